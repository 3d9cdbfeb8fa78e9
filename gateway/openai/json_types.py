"""What a JSON value may be, read into a Python value: one reader per type, raising WrongType in words."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from google.protobuf.internal.enum_type_wrapper import EnumTypeWrapper

Reader = Callable[[Any], Any]

UINT32_MAX = (1 << 32) - 1
SHOWN_CHARS_MAX = 40
INT64_MIN, UINT64_MAX = -(1 << 63), (1 << 64) - 1


class WrongType(ValueError):
    """A value that is not of its parameter's type; `at` is where in the value, such as "[3]"."""

    def __init__(self, reason_text: str, at: str = "") -> None:
        super().__init__(reason_text)
        self.reason_text = reason_text
        self.at = at


def shown(value: object) -> str:
    """A value as an error message may quote it: short, and never a whole prompt."""
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= SHOWN_CHARS_MAX else text[: SHOWN_CHARS_MAX - 1] + "…"


def shown_name(name: str) -> str:
    """A field's name as an error may quote it: it is the caller's own and can be anything."""
    return shown(name).strip('"')


def boolean(value: Any) -> bool:
    """true or false."""
    if not isinstance(value, bool):
        raise WrongType(f"must be true or false, not {shown(value)}")
    return value


def text(value: Any) -> str:
    """A string."""
    if not isinstance(value, str):
        raise WrongType(f"must be a string, not {shown(value)}")
    return value


def number(value: Any) -> float:
    """Any number; what JSON calls one is finite."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise WrongType(f"must be a number, not {shown(value)}")
    return float(value)


def integer(low: int, high: int) -> Reader:
    """A whole number within the contract's type; narrower rules are the tokenizer's."""

    def read(value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            raise WrongType(f"must be an integer, not {shown(value)}")
        if not low <= value <= high:
            raise WrongType(f"must be {low} to {high}, not {shown(value)}")
        return value

    return read


uint32 = integer(0, UINT32_MAX)
int32 = integer(-(1 << 31), (1 << 31) - 1)


def seed(value: Any) -> int:
    """Any 64-bit integer; a negative one stands for its two's complement."""
    return int(integer(INT64_MIN, UINT64_MAX)(value)) & UINT64_MAX


def list_of(read_item: Reader) -> Reader:
    """A list whose items all have one type."""

    def read(value: Any) -> list[Any]:
        if not isinstance(value, list):
            raise WrongType(f"must be a list, not {shown(value)}")
        return [_read_at(f"[{index}]", read_item, item) for index, item in enumerate(value)]

    return read


def one_or_more(read_item: Reader) -> Reader:
    """One item, or a list of them; a list comes out."""
    read_list = list_of(read_item)
    return lambda value: read_list(value) if isinstance(value, list) else [read_item(value)]


def bias_by_token(value: Any) -> dict[int, float]:
    """An object from token ids, which JSON can only write as strings, to numbers."""
    if not isinstance(value, dict):
        raise WrongType(f"must be an object from token ids to numbers, not {shown(value)}")
    return {_token_id(key): _read_at(f"[{shown(key)}]", number, bias) for key, bias in value.items()}


def one_of(prefix: str, enum: EnumTypeWrapper) -> Reader:
    """One of a contract's words in lower case, without what its enum puts before them; its number comes out."""
    numbers = {name.removeprefix(prefix).lower(): number for name, number in enum.items() if number}

    def read(value: Any) -> int:
        if not isinstance(value, str) or value not in numbers:
            raise WrongType(f"must be one of {', '.join(map(repr, numbers))}, not {shown(value)}")
        return numbers[value]

    return read


def _token_id(key: str) -> int:
    if not (key.isascii() and key.isdecimal() and len(key) <= 10 and int(key) <= UINT32_MAX):
        raise WrongType(f"must have token ids as keys, not {shown(key)}")
    return int(key)


def _read_at(at: str, read: Reader, value: Any) -> Any:
    try:
        return read(value)
    except WrongType as wrong:
        raise WrongType(wrong.reason_text, at + wrong.at) from None
