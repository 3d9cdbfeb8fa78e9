"""The types that a configuration value may have, and how each is read from text (environment, flags) and from TOML."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

_TRUE = ("true", "yes", "on", "1")
_FALSE = ("false", "no", "off", "0")


@dataclass(frozen=True, slots=True)
class Type:
    """What a key accepts: str, int, float, bool, Path or tuple (of str), perhaps None, perhaps listed choices."""

    base: type
    optional: bool = False
    choices: tuple[str, ...] = ()

    def __str__(self) -> str:
        names = {str: "text", int: "a whole number", float: "a number", bool: "true or false", Path: "a path"}
        name = " or ".join(self.choices) or names.get(self.base, "a comma-separated list")
        return f"{name}, or empty for none" if self.optional else name


def parse_type(hint: Any) -> Type:
    """The Type of a dataclass field's annotation. Raises TypeError for one that configuration cannot hold."""
    if hint in (str, int, float, bool, Path):
        return Type(hint)
    if hint == tuple[str, ...]:
        return Type(tuple)
    if get_origin(hint) is Literal:
        return Type(str, choices=get_args(hint))
    if get_origin(hint) in (Union, UnionType) and NoneType in get_args(hint) and len(get_args(hint)) == 2:
        inner = parse_type(next(arg for arg in get_args(hint) if arg is not NoneType))
        return Type(inner.base, optional=True, choices=inner.choices)
    raise TypeError(f"a configuration field cannot be of type {hint}")


def from_text(kind: Type, text: str) -> object:
    """The value that a flag's or a variable's text stands for. Raises ValueError when it fits not."""
    if kind.optional and not text:
        return None
    if kind.base is tuple:
        return tuple(part.strip() for part in text.split(",") if part.strip())
    if kind.base is bool:
        return _bool_of(kind, text.strip().lower())
    if kind.base is str:
        return _chosen(kind, text)
    try:
        return _finite(kind, kind.base(text))
    except ValueError:
        raise ValueError(f"must be {kind}, not {text!r}") from None


def from_toml(kind: Type, value: object) -> object:
    """The value of a TOML key, which has a type already. Raises ValueError when it fits not."""
    if kind.base is tuple and isinstance(value, list) and all(isinstance(item, str) for item in value):
        return tuple(value)
    if isinstance(value, str) and kind.base in (str, Path, tuple):
        return from_text(kind, value)
    if isinstance(value, str) and kind.optional and not value:
        return None
    if kind.base is bool and isinstance(value, bool):
        return value
    if kind.base in (int, float) and isinstance(value, int) and not isinstance(value, bool):
        return kind.base(value)
    if kind.base is float and isinstance(value, float):
        return _finite(kind, value)
    raise ValueError(f"must be {kind}, not {value!r}")


def shown(value: object) -> str:
    """A value as it would be written in a flag."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return ",".join(value)
    return "" if value is None else str(value)


def _bool_of(kind: Type, word: str) -> bool:
    if word not in _TRUE + _FALSE:
        raise ValueError(f"must be {kind}, not {word!r}")
    return word in _TRUE


def _chosen(kind: Type, text: str) -> str:
    if kind.choices and text not in kind.choices:
        raise ValueError(f"must be {kind}, not {text!r}")
    return text


def _finite(kind: Type, value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"must be {kind}, not {value!r}")
    return value
