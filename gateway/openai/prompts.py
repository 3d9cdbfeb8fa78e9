"""The prompt of a completion request: one text, several, one list of token ids, or several."""

from __future__ import annotations

from typing import Any

from gateway.openai.json_types import list_of, shown, uint32
from gateway.openai.parameters import read_value
from services.runtime.errors import InvalidRequest
from tailrace.v1 import generation_pb2

Prompt = str | generation_pb2.TokenIds


def read_prompts(value: Any) -> list[Prompt]:
    """The prompts, at least one; each is answered on its own. Raises InvalidRequest."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list) or not value:
        raise InvalidRequest("prompt", f"must be a text, a list of texts, or token ids, not {_shown(value)}")
    if isinstance(value[0], int):
        return [_token_ids("prompt", value)]
    return [_read_prompt(f"prompt[{index}]", item) for index, item in enumerate(value)]


def _read_prompt(at: str, value: Any) -> Prompt:
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return _token_ids(at, value)
    raise InvalidRequest(at, f"must be a text or a list of token ids, not {shown(value)}")


def _token_ids(at: str, value: list[Any]) -> generation_pb2.TokenIds:
    return generation_pb2.TokenIds(ids=read_value(at, list_of(uint32), value))


def _shown(value: Any) -> str:
    return "an empty list" if value == [] else shown(value)
