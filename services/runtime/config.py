"""A process's configuration: a flat frozen dataclass, filled from defaults < TOML file < environment < flags.

An unknown key is an error in every one of these places, as is a value that does not fit; errors name the key, where it
was set, and what it may have been meant to be.
"""

from __future__ import annotations

import os
import re
import tomllib
from argparse import SUPPRESS, ArgumentParser
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NoReturn, TypeVar, get_type_hints

from services.runtime import __version__
from services.runtime.config_value import Type, from_text, from_toml, parse_type, shown
from services.runtime.log import LogFormat, LogLevel

CONFIG_VARIABLE = "TAILRACE_CONFIG"
MAX_PORT = 65535
UNITS = {"_s": "SECONDS", "_ms": "MILLISECONDS", "_bytes": "BYTES", "_tokens": "TOKENS"}
_ENDPOINT = re.compile(r"https?://[^/\s]+:\d+/?")
_METAVARS: dict[type, str] = {str: "TEXT", int: "N", float: "NUMBER", Path: "PATH", tuple: "A,B,..."}

C = TypeVar("C")


class ConfigError(ValueError):
    """A configuration that cannot be used; the message is for whoever wrote it."""


class BadValue(ValueError):
    """A value that breaks its key's rule; `load` adds where it was set."""

    def __init__(self, key: str, rule: str, value: object) -> None:
        super().__init__(f"{key} {rule}, not {value!r}")
        self.key = key


def option(default: Any = MISSING, *, help: str) -> Any:  # noqa: A002  # what it is called everywhere
    """A configuration field: its default (none: it must be set) and one sentence for `--help`."""
    return field(default=default, metadata={"help": help})


def require(config: object, key: str, ok: bool, rule: str) -> None:
    """Raises BadValue unless `ok`, as in `require(self, "port", self.port >= 0, "must be 0 or more")`.

    For `__post_init__`, where a rule that spans keys names the one to change.
    """
    if not ok:
        raise BadValue(key, rule, getattr(config, key))


@dataclass(frozen=True, kw_only=True)
class ProcessConfig:
    """What every process can be told; each service's own configuration extends it."""

    name: str = option("", help="name of this process, unique in the deployment; empty: the service's name")
    host: str = option("127.0.0.1", help="address to listen on; 0.0.0.0 or :: for every interface")
    port: int = option(0, help="port of the service; 0 picks a free one")
    admin_port: int = option(0, help="port for operators (inspection, drain, health); 0 picks a free one")
    metrics_port: int = option(0, help="port of /metrics; 0 picks a free one")
    max_concurrent_rpcs: int | None = option(
        None, help="most calls at a time on the service's port, health checks included; beyond it RESOURCE_EXHAUSTED"
    )
    drain_timeout_s: float = option(30.0, help="how long open requests may take to finish after SIGTERM")
    log_format: LogFormat = option("auto", help="text, json, or auto: text on a terminal, otherwise json")
    log_level: LogLevel = option("info", help="least level that is written")
    tracing_endpoint: str = option("", help="where spans are sent, OTLP over gRPC, as http://host:4317; empty: nowhere")
    tracing_sample_ratio: float = option(1.0, help="share of the traces begun here that is recorded, 0 to 1")
    tracing_service_name: str = option("", help="service.name of the spans; empty: tailrace- and the service")
    die_with_parent: bool = option(False, help="end at once when the process that started this one ends")

    def __post_init__(self) -> None:
        require(self, "host", bool(self.host), "must not be empty")
        for key in ("port", "admin_port", "metrics_port"):
            require(self, key, 0 <= getattr(self, key) <= MAX_PORT, f"must be 0 to {MAX_PORT}")
        require(
            self,
            "max_concurrent_rpcs",
            self.max_concurrent_rpcs is None or self.max_concurrent_rpcs >= 1,
            "must be 1 or more",
        )
        require(self, "drain_timeout_s", self.drain_timeout_s >= 0, "must be 0 or more")
        endpoint = self.tracing_endpoint
        require(
            self, "tracing_endpoint", not endpoint or bool(_ENDPOINT.fullmatch(endpoint)), "must be http(s)://host:port"
        )
        require(self, "tracing_sample_ratio", 0 <= self.tracing_sample_ratio <= 1, "must be 0 to 1")


def load(cls: type[C], *, prog: str, argv: Sequence[str], environ: Mapping[str, str] | None = None) -> C:
    """Builds a `cls` for the program `prog`; `--help` and `--version` print and raise SystemExit(0).

    Raises ConfigError for an unknown key, a value of the wrong type or outside its range, a missing one, or an
    unreadable file.
    """
    environ = os.environ if environ is None else environ
    keys = _keys_of(cls)
    flags = _parse_flags(prog, keys, argv)
    path = flags.pop("config", None) or environ.get(CONFIG_VARIABLE)
    found = [
        *(_from_file(Path(path), prog, keys) if path else ()),
        *_from_environ(environ, prog, keys),
        *_from_flags(flags, keys),
    ]
    values = {setting.key: setting.value for setting in found}
    sources = {setting.key: setting.source for setting in found}
    return _build(cls, keys, values, sources)


@dataclass(frozen=True, slots=True)
class _Key:
    """One field of a configuration class."""

    name: str
    type: Type
    default: object
    help: str


@dataclass(frozen=True, slots=True)
class _Setting:
    """One value that somebody set, and where."""

    key: str
    value: object
    source: str


def _keys_of(cls: type) -> dict[str, _Key]:
    hints = get_type_hints(cls)
    return {item.name: _key_of(item, hints[item.name]) for item in fields(cls)}


def _key_of(item: Field[Any], hint: Any) -> _Key:
    try:
        return _Key(item.name, parse_type(hint), item.default, item.metadata.get("help", ""))
    except TypeError as error:
        raise TypeError(f"{item.name}: {error}") from error


def _build(cls: type[C], keys: Mapping[str, _Key], values: Mapping[str, object], sources: Mapping[str, str]) -> C:
    for key in keys.values():
        if key.default is MISSING and key.name not in values:
            raise ConfigError(f"{key.name} must be set ({key.help})")
    try:
        return cls(**values)
    except BadValue as error:
        raise ConfigError(f"{error} (set by {sources.get(error.key, 'its default')})") from error
    except ValueError as error:
        where = f" (set: {', '.join(sorted(set(sources.values())))})" if sources else ""
        raise ConfigError(f"{error}{where}") from error


def _from_file(path: Path, prog: str, keys: Mapping[str, _Key]) -> list[_Setting]:
    """The settings of the [prog] table; a file without one sets nothing, for services share a file."""
    document = _read_toml(path)
    for name, value in document.items():
        if not isinstance(value, dict):
            raise ConfigError(f"{name} stands outside any table in {path}; settings belong under [{prog}]")
    source = f"[{prog}] in {path}"
    table = document.get(prog, {})
    _check_known(table, keys, source, str)
    return [_setting(keys[name], source, from_toml, value) for name, value in table.items()]


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"the configuration file {path} is not TOML: {error}") from error


def _from_environ(environ: Mapping[str, str], prog: str, keys: Mapping[str, _Key]) -> list[_Setting]:
    prefix = _prefix(prog)

    def variable(name: str) -> str:
        return prefix + name.upper()

    texts = {name.removeprefix(prefix).lower(): text for name, text in environ.items() if name.startswith(prefix)}
    _check_known(texts, keys, "environment", variable)
    return [
        _setting(keys[name], f"environment variable {variable(name)}", from_text, text) for name, text in texts.items()
    ]


def _from_flags(flags: Mapping[str, str], keys: Mapping[str, _Key]) -> list[_Setting]:
    return [_setting(keys[name], f"flag {_flag(name)}", from_text, text) for name, text in flags.items()]


def _check_known(names: Iterable[str], keys: Mapping[str, _Key], source: str, write: Callable[[str], str]) -> None:
    for name in names:
        if name not in keys:
            raise ConfigError(f"unknown key {write(name)} ({source}){_suggestion(name, keys, write)}")


def _setting(key: _Key, source: str, read: Callable[[Type, Any], object], raw: object) -> _Setting:
    try:
        return _Setting(key.name, read(key.type, raw), source)
    except ValueError as error:
        raise ConfigError(f"{key.name} {error} (set by {source})") from error


def _suggestion(name: str, known: Iterable[str], write: Callable[[str], str]) -> str:
    """The known names that look like this one, each as it is written in the place where this one stood."""
    near = get_close_matches(name, known, n=3, cutoff=0.6)
    return f"; did you mean {' or '.join(map(write, near))}?" if near else ""


def _parse_flags(prog: str, keys: Mapping[str, _Key], argv: Sequence[str]) -> dict[str, str]:
    """The flags that were given, by field name (and "config"), as text."""
    parsed, unknown = _parser_of(prog, keys).parse_known_args(list(argv))
    if unknown:
        name = unknown[0].split("=")[0]
        raise ConfigError(f"unknown argument {name}{_suggestion(name.lstrip('-').replace('-', '_'), keys, _flag)}")
    return dict(vars(parsed))


def _parser_of(prog: str, keys: Mapping[str, _Key]) -> ArgumentParser:
    parser = _Parser(
        prog=prog,
        allow_abbrev=False,
        argument_default=SUPPRESS,
        epilog=f"Every option can also be set in the [{prog}] table of the file, under its name with underscores, "
        f"or as {_prefix(prog)}<NAME>; flags win over the environment, and that over the file.",
    )
    parser.add_argument("--version", action="version", version=f"tailrace {__version__}")
    parser.add_argument("--config", metavar="FILE", help=f"TOML file to read (or {CONFIG_VARIABLE})")
    for key in keys.values():
        _add_flag(parser, key)
    return parser


def _add_flag(parser: ArgumentParser, key: _Key) -> None:
    flag, text = _flag(key.name), _help_of(key).replace("%", "%%")
    if key.type.base is bool:
        parser.add_argument(flag, metavar="true|false", nargs="?", const="true", help=text)
    else:
        parser.add_argument(flag, metavar=_metavar(key), help=text)


def _metavar(key: _Key) -> str:
    unit = next((unit for ending, unit in UNITS.items() if key.name.endswith(ending)), "")
    return unit or "|".join(key.type.choices) or _METAVARS[key.type.base]


def _help_of(key: _Key) -> str:
    if key.default is MISSING:
        return f"{key.help} (must be set)"
    return f"{key.help} (default: {shown(key.default) or 'none'})"


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _prefix(prog: str) -> str:
    return f"TAILRACE_{prog.replace('-', '_').upper()}_"


class _Parser(ArgumentParser):
    """Raises instead of printing usage and exiting, so that every bad configuration is reported in one way."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)
