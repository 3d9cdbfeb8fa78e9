"""The options of a request as keyword arguments, and how they become the contract's messages."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypedDict

from google.protobuf.message import Message as ProtoMessage

from tailrace.client.errors import InvalidRequest
from tailrace.v1 import common_pb2, generation_pb2

Message = Mapping[str, str]
"""A turn of a conversation: {"role": "user", "content": "…"}."""


class Options(TypedDict, total=False):
    """Everything beside the prompt; what is left out has the server's default. The contract explains each field."""

    request_id: str
    model: str
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int
    logit_bias: Mapping[int, float]
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    include_stop_in_output: bool
    ignore_eos: bool
    max_tokens: int
    min_tokens: int
    skip_special_tokens: bool
    spaces_between_special_tokens: bool
    token_info: bool
    logprobs: int
    prompt_logprobs: int
    n: int
    timeout_s: float
    whole: bool
    detach: bool
    detach_ttl_s: float
    retain_s: float


_SECTION_OF = {
    field.name: section
    for section, message in (
        ("sampling", common_pb2.SamplingParams),
        ("stopping", common_pb2.StopConditions),
        ("text", common_pb2.TextOptions),
        ("output", generation_pb2.OutputOptions),
    )
    for field in message.DESCRIPTOR.fields
}
_MILLISECONDS = {"detach_ttl_s": "detach_ttl_ms", "retain_s": "retain_ms"}
_KNOWN = frozenset(Options.__annotations__)


def generate_request(prompt: str | Sequence[int], options: Options) -> generation_pb2.GenerateRequest:
    """A Generate of a text or of ids. Raises InvalidRequest for a value that the contract's types can't hold."""
    request = generation_pb2.GenerateRequest()
    if isinstance(prompt, str):
        _put(request, "text", prompt, "text")
    else:
        _put(request.token_ids, "ids", prompt, "token_ids.ids")
    _fill(request, options)
    return request


def chat_request(messages: Iterable[Message], options: Options) -> generation_pb2.ChatRequest:
    """A Chat. Raises InvalidRequest like `generate_request`."""
    request = generation_pb2.ChatRequest()
    add_messages(request.messages.add, messages, "messages")
    _fill(request, options)
    return request


def add_messages(add: Callable[[], generation_pb2.ChatMessage], messages: Iterable[Message], field: str) -> None:
    """Adds the turns to a message's field."""
    for index, message in enumerate(messages):
        turn = add()
        for name in ("role", "content"):
            _put(turn, name, message.get(name, ""), f"{field}[{index}].{name}")


def _fill(request: generation_pb2.GenerateRequest | generation_pb2.ChatRequest, options: Options) -> None:
    for name, value in options.items():
        if name not in _KNOWN:
            raise TypeError(f"unknown option {name!r}; known are {', '.join(sorted(_KNOWN))}")
        if name in ("request_id", "model"):
            _put(request, name, value, name)
        else:
            _put_option(request.options, name, value)


def _put_option(options: generation_pb2.GenerationOptions, name: str, value: Any) -> None:
    if name in _SECTION_OF:
        section = _SECTION_OF[name]
        value = [value] if name == "stop" and isinstance(value, str) else value
        _put(getattr(options, section), name, value, f"options.{section}.{name}")
    elif name == "timeout_s":
        _put(options, "timeout_ms", max(1, round(value * 1000)), "options.timeout_ms")
    elif name in _MILLISECONDS:
        field = _MILLISECONDS[name]
        _put(options, field, round(value * 1000), f"options.{field}")
    elif name == "detach":
        options.on_disconnect = generation_pb2.ON_DISCONNECT_DETACH if value else generation_pb2.ON_DISCONNECT_ABORT
    elif name == "whole":
        options.delivery = generation_pb2.DELIVERY_WHOLE if value else generation_pb2.DELIVERY_STREAM
    else:
        _put(options, name, value, f"options.{name}")


def _put(message: ProtoMessage, name: str, value: Any, field: str) -> None:
    """Sets a field; what its type can't hold (-1 for an unsigned one, a lone surrogate) is refused under its name."""
    try:
        if isinstance(value, Mapping):
            getattr(message, name).update(value)
        elif isinstance(value, Iterable) and not isinstance(value, str | bytes):
            getattr(message, name).extend(value)
        else:
            setattr(message, name, value)
    except (ValueError, TypeError, OverflowError) as error:
        raise InvalidRequest(field, f"{field}: {error}") from error
