import os
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.runtime import __version__
from services.runtime.config import ConfigError, ProcessConfig, load, option, require


@dataclass(frozen=True, kw_only=True)
class Config(ProcessConfig):
    port: int = option(7001, help="port of the service")
    model: Path | None = option(None, help="directory of the model")
    schedulers: tuple[str, ...] = option(("127.0.0.1:7003",), help="addresses, at 100% of the load")
    policy: Literal["fifo", "priority"] = option("fifo", help="which goes first")
    queue_limit: int | None = option(64, help="most waiting requests; none: no limit")
    grace_ms: float = option(250.0, help="pause")

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self, "grace_ms", self.grace_ms >= 0, "must be 0 or more")
        if self.policy == "priority" and self.queue_limit is None:
            raise ValueError("priority needs a queue_limit")


@dataclass(frozen=True, kw_only=True)
class Needy:
    model: str = option(help="the model to serve")


def loaded(*argv: str, environ: dict[str, str] | None = None) -> Config:
    return load(Config, prog="tokenizer", argv=argv, environ=environ or {})


def refusal(*argv: str, environ: dict[str, str] | None = None) -> str:
    with pytest.raises(ConfigError) as refused:
        loaded(*argv, environ=environ)
    return str(refused.value)


def toml(tmp_path: Path, text: str) -> str:
    path = tmp_path / "tailrace.toml"
    path.write_text(text)
    return str(path)


def test_defaults_stand_where_nothing_is_set() -> None:
    assert loaded() == Config()


def test_a_subclass_replaces_a_default_and_keeps_the_rest() -> None:
    assert (loaded().port, loaded().host, loaded().metrics_port) == (7001, "127.0.0.1", 0)


def test_flags_win_over_the_environment_which_wins_over_the_file_which_wins_over_defaults(tmp_path: Path) -> None:
    path = toml(tmp_path, "[tokenizer]\nport = 1\nadmin_port = 1\nmetrics_port = 1\n")
    environ = {"TAILRACE_CONFIG": path, "TAILRACE_TOKENIZER_PORT": "2", "TAILRACE_TOKENIZER_ADMIN_PORT": "2"}
    config = loaded("--port", "3", environ=environ)
    assert (config.port, config.admin_port, config.metrics_port, config.host) == (3, 2, 1, "127.0.0.1")


def test_the_config_flag_wins_over_the_config_variable(tmp_path: Path) -> None:
    path = toml(tmp_path, "[tokenizer]\nport = 1\n")
    assert loaded("--config", path, environ={"TAILRACE_CONFIG": "/nowhere"}).port == 1


def test_the_processes_own_environment_is_read_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TAILRACE_TOKENIZER_PORT", "5")
    assert load(Config, prog="tokenizer", argv=()).port == 5
    assert "TAILRACE_TOKENIZER_PORT" in os.environ


def test_tables_and_variables_of_other_services_are_theirs(tmp_path: Path) -> None:
    path = toml(tmp_path, "[scheduler]\nblocks = 9\n")
    assert loaded("--config", path, environ={"TAILRACE_SCHEDULER_BLOCKS": "9", "PORT": "1"}) == Config()


def test_a_hyphen_in_the_programs_name_is_an_underscore_in_variables() -> None:
    assert load(Config, prog="token-izer", argv=(), environ={"TAILRACE_TOKEN_IZER_PORT": "4"}).port == 4


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("host", "::1", "::1"),
        ("port", "8_000", 8000),
        ("drain_timeout_s", "2.5", 2.5),
        ("drain_timeout_s", "3", 3.0),
        ("die_with_parent", "true", True),
        ("die_with_parent", "Off", False),
        ("model", "/models/x", Path("/models/x")),
        ("model", "", None),
        ("schedulers", "a:1, b:2", ("a:1", "b:2")),
        ("schedulers", "", ()),
        ("policy", "priority", "priority"),
        ("queue_limit", "7", 7),
        ("queue_limit", "", None),
    ],
)
def test_text_is_read_by_the_fields_type_in_flags_and_variables_alike(key: str, text: str, value: object) -> None:
    by_flag = loaded(f"--{key.replace('_', '-')}={text}")
    by_variable = loaded(environ={f"TAILRACE_TOKENIZER_{key.upper()}": text})
    assert getattr(by_flag, key) == value
    assert by_flag == by_variable


@pytest.mark.parametrize(
    ("line", "key", "value"),
    [
        ('host = "::1"', "host", "::1"),
        ("drain_timeout_s = 3", "drain_timeout_s", 3.0),
        ("die_with_parent = true", "die_with_parent", True),
        ('model = "m"', "model", Path("m")),
        ('model = ""', "model", None),
        ('queue_limit = ""', "queue_limit", None),
        ('schedulers = ["a:1", "b:2"]', "schedulers", ("a:1", "b:2")),
        ('schedulers = "a:1,b:2"', "schedulers", ("a:1", "b:2")),
        ('policy = "priority"', "policy", "priority"),
    ],
)
def test_toml_values_become_the_fields_type(tmp_path: Path, line: str, key: str, value: object) -> None:
    assert getattr(loaded("--config", toml(tmp_path, f"[tokenizer]\n{line}\n")), key) == value


@pytest.mark.parametrize(
    "line",
    [
        "port = true",
        "port = 1.0",
        'port = "1"',
        "host = 1",
        "die_with_parent = 1",
        'die_with_parent = "yes"',
        "drain_timeout_s = nan",
        "drain_timeout_s = inf",
        'drain_timeout_s = "3"',
        "schedulers = [1]",
        'policy = "lifo"',
        "model = 3",
        "queue_limit = 1.5",
        "host = { a = 1 }",
    ],
)
def test_a_toml_value_of_another_type_is_refused_with_its_key_and_place(tmp_path: Path, line: str) -> None:
    path = toml(tmp_path, f"[tokenizer]\n{line}\n")
    message = refusal("--config", path)
    assert message.startswith(f"{line.split(' ')[0]} must be ")
    assert f"[tokenizer] in {path}" in message


@pytest.mark.parametrize("text", ["", "x", "1.5", "0x10", "1 2", "nan"])
def test_a_number_that_is_none_is_refused_with_key_value_and_place(text: str) -> None:
    assert refusal(f"--port={text}") == f"port must be a whole number, not {text!r} (set by flag --port)"
    variable = "TAILRACE_TOKENIZER_PORT"
    assert refusal(environ={variable: text}).endswith(f"not {text!r} (set by environment variable {variable})")


def test_values_outside_their_range_are_refused_with_the_place_they_came_from(tmp_path: Path) -> None:
    path = toml(tmp_path, "[tokenizer]\nadmin_port = 65536\n")
    assert refusal("--port", "70000") == "port must be 0 to 65535, not 70000 (set by flag --port)"
    assert refusal("--config", path) == f"admin_port must be 0 to 65535, not 65536 (set by [tokenizer] in {path})"
    assert "grace_ms must be 0 or more, not -1.0" in refusal(environ={"TAILRACE_TOKENIZER_GRACE_MS": "-1"})


def test_a_rule_that_spans_keys_is_reported_with_all_places() -> None:
    message = refusal("--policy=priority", environ={"TAILRACE_TOKENIZER_QUEUE_LIMIT": ""})
    assert message.startswith("priority needs a queue_limit")
    assert "flag --policy" in message
    assert "TAILRACE_TOKENIZER_QUEUE_LIMIT" in message


def test_the_class_itself_refuses_what_is_out_of_range() -> None:
    for wrong in (
        {"port": -1},
        {"metrics_port": 65536},
        {"drain_timeout_s": -0.1},
        {"host": ""},
        {"max_concurrent_rpcs": 0},
    ):
        with pytest.raises(ValueError, match=next(iter(wrong))):
            ProcessConfig(**wrong)


def test_an_unknown_key_in_the_file_is_named_with_what_it_may_have_meant(tmp_path: Path) -> None:
    path = toml(tmp_path, "[tokenizer]\nqueue_limits = 3\n")
    assert refusal("--config", path) == (f"unknown key queue_limits ([tokenizer] in {path}); did you mean queue_limit?")


def test_an_unknown_variable_is_named_with_what_it_may_have_meant() -> None:
    assert refusal(environ={"TAILRACE_TOKENIZER_METRICS_PROT": "1"}) == (
        "unknown key TAILRACE_TOKENIZER_METRICS_PROT (environment); did you mean TAILRACE_TOKENIZER_METRICS_PORT?"
    )


@pytest.mark.parametrize("argv", [("--metric-port", "1"), ("--metric-port=1",)])
def test_an_unknown_flag_is_named_with_what_it_may_have_meant_and_never_guessed(argv: tuple[str, ...]) -> None:
    assert refusal(*argv).startswith("unknown argument --metric-port; did you mean --metrics-port")


def test_an_argument_without_a_flag_is_refused() -> None:
    assert refusal("serve") == "unknown argument serve"


def test_a_flag_without_its_value_is_refused() -> None:
    assert "--port" in refusal("--port")


def test_a_key_like_nothing_known_gets_no_suggestion() -> None:
    assert "did you mean" not in refusal("--zzzzzz=1")


def test_a_setting_outside_any_table_is_refused(tmp_path: Path) -> None:
    assert "port stands outside any table" in refusal("--config", toml(tmp_path, "port = 1\n"))


@pytest.mark.parametrize("text", ["[tokenizer", "= 3", "\x00"])
def test_a_file_that_is_not_toml_is_refused_by_name(tmp_path: Path, text: str) -> None:
    path = toml(tmp_path, text)
    assert f"{path} is not TOML" in refusal("--config", path)


def test_a_file_that_cannot_be_read_is_refused_by_name(tmp_path: Path) -> None:
    assert f"{tmp_path}/none.toml: No such file" in refusal("--config", f"{tmp_path}/none.toml")
    assert "Is a directory" in refusal(environ={"TAILRACE_CONFIG": str(tmp_path)})


def test_a_field_without_a_default_must_be_set() -> None:
    with pytest.raises(ConfigError, match=r"model must be set \(the model to serve\)"):
        load(Needy, prog="needy", argv=(), environ={})
    assert load(Needy, prog="needy", argv=("--model=x",), environ={}) == Needy(model="x")


def test_a_bare_switch_means_true() -> None:
    assert loaded("--die-with-parent").die_with_parent
    assert not loaded("--die-with-parent", "false").die_with_parent


def test_help_shows_every_key_with_its_default_and_unit(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        loaded("--help")
    text = " ".join(capsys.readouterr().out.split())
    assert ended.value.code == 0
    for shown in (
        "--port N port of the service (default: 7001)",
        "--drain-timeout-s SECONDS",
        "--grace-ms MILLISECONDS pause (default: 250.0)",
        "--policy fifo|priority",
        "at 100% of the load (default: 127.0.0.1:7003)",
        "--model PATH directory of the model (default: none)",
        "TAILRACE_TOKENIZER_<NAME>",
        "[tokenizer] table",
    ):
        assert shown in text


def test_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        loaded("--version")
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"tailrace {__version__}\n"


def test_a_type_that_configuration_cannot_hold_is_our_bug() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Wrong:
        table: dict[str, int] | None = option(None, help="no")

    with pytest.raises(TypeError, match="table"):
        load(Wrong, prog="wrong", argv=(), environ={})


@given(st.dictionaries(st.sampled_from(["port", "admin_port", "metrics_port"]), st.integers(0, 65535)))
def test_whatever_flags_set_is_what_is_loaded(values: dict[str, int]) -> None:
    argv = [text for key, value in values.items() for text in (f"--{key.replace('_', '-')}", str(value))]
    assert loaded(*argv) == replace(Config(), **values)  # type: ignore[arg-type]  # only ports are drawn


@given(st.text(), st.sampled_from(["port", "die_with_parent", "drain_timeout_s", "policy", "queue_limit"]))
def test_a_text_is_either_a_value_or_refused_with_its_key(text: str, key: str) -> None:
    environ = {f"TAILRACE_TOKENIZER_{key.upper()}": text}
    with suppress(ConfigError):
        assert isinstance(loaded(environ=environ), Config)
        return
    assert key in refusal(environ=environ)


@pytest.mark.parametrize("endpoint", ["collector:4317", "http://collector", "grpc://collector:4317", "http://:4317 "])
def test_a_tracing_endpoint_that_is_no_url_with_a_port_is_refused(endpoint: str) -> None:
    assert "tracing_endpoint must be http(s)://host:port" in refusal("--tracing-endpoint", endpoint)


def test_a_share_of_traces_beyond_one_is_refused() -> None:
    assert "tracing_sample_ratio must be 0 to 1" in refusal("--tracing-sample-ratio", "1.5")
