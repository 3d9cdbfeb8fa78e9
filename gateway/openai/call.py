"""One HTTP request, read: what it asks of the tokenizer, and how its answer is wanted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gateway.openai import json_types as types
from gateway.openai.echo import Echo
from gateway.openai.json_types import shown
from gateway.openai.parameters import Given, read_value
from services.protocol.generation import OpenPb
from services.runtime.errors import InvalidRequest
from tailrace.v1 import generation_pb2

STRUCTURAL = frozenset({"model", "stream", "stream_options"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One request per prompt, `n` choices each. `names`: which parameter set which field of the options.

    `echoes`: what each request's choices begin with.
    """

    requests: Sequence[OpenPb]
    n: int
    stream: bool
    include_usage: bool
    names: Mapping[str, str]
    echoes: Sequence[Echo]


def read_model(body: Mapping[str, Any]) -> str:
    """The model's name; "" for the served one."""
    return str(read_value("model", types.text, body["model"])) if body.get("model") is not None else ""


def read_stream(body: Mapping[str, Any]) -> tuple[bool, bool]:
    """Whether the answer is to be streamed, and whether its usage is to be told then."""
    stream = read_flag(body, "stream")
    options = body.get("stream_options")
    if options is None:
        return stream, False
    if not stream:
        raise InvalidRequest("stream_options", "is only for streamed answers (stream: true)")
    if not isinstance(options, dict):
        raise InvalidRequest("stream_options", f"must be an object, not {shown(options)}")
    for name in options.keys() - {"include_usage", "include_obfuscation"}:
        raise InvalidRequest(f"stream_options.{name}", "is not an option")
    usage = options.get("include_usage")
    return stream, usage is not None and bool(read_value("stream_options.include_usage", types.boolean, usage))


def read_flag(body: Mapping[str, Any], name: str) -> bool:
    """A boolean that is false unless given."""
    return body.get(name) is not None and bool(read_value(name, types.boolean, body[name]))


def deliver(given: Given, *, stream: bool) -> None:
    """Asks for the answer piece by piece, or whole."""
    given.options.delivery = generation_pb2.DELIVERY_STREAM if stream else generation_pb2.DELIVERY_WHOLE


def choices_of(given: Given) -> int:
    """The number of choices per prompt as given; its range is checked where the request is opened."""
    return given.options.n if given.options.HasField("n") else 1
