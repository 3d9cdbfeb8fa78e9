"""Reads a request from the wire and refuses it, naming the field, unless it can be served."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Literal

from services.protocol.constraint_wire import constraint_from_wire
from services.protocol.model_card import ModelCard
from services.protocol.request import (
    MAX_CHOICES,
    MAX_LOGIT_BIAS,
    MAX_LOGPROBS,
    MAX_MESSAGES,
    MAX_PRIORITY,
    MAX_STOP_LENGTH,
    MAX_STOPS,
    MAX_TEMPERATURE,
    ChatPrompt,
    Constraint,
    Failover,
    IdsPrompt,
    Message,
    OnDisconnect,
    Prompt,
    Sampling,
    Stopping,
    TextOptions,
    TextPrompt,
    ValidRequest,
)
from services.runtime.errors import InvalidRequest, NotFound
from tailrace.v1 import common_pb2, generation_pb2

_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")


def parse_generate(pb: generation_pb2.GenerateRequest, card: ModelCard) -> ValidRequest:
    """A Generate as a ValidRequest. Raises InvalidRequest with the field's proto path, or NotFound for the model."""
    _check_model(pb.model, card)
    return _parse(pb.request_id, _generate_prompt(pb, card), pb.options, card)


def parse_chat(pb: generation_pb2.ChatRequest, card: ModelCard) -> ValidRequest:
    """A Chat as a ValidRequest. Raises like `parse_generate`."""
    _check_model(pb.model, card)
    return _parse(pb.request_id, ChatPrompt(parse_messages(pb.messages, "messages")), pb.options, card)


def parse_messages(pbs: Iterable[generation_pb2.ChatMessage], field: str) -> tuple[Message, ...]:
    """The turns of a conversation. Raises InvalidRequest naming `field` or one of its entries."""
    messages = tuple(Message(pb.role, pb.content) for pb in pbs)
    if not 1 <= len(messages) <= MAX_MESSAGES:
        raise InvalidRequest(field, f"must hold 1 to {MAX_MESSAGES} messages, not {len(messages)}")
    for index, message in enumerate(messages):
        if not message.role:
            raise InvalidRequest(f"{field}[{index}].role", "must not be empty, such as 'user'")
    return messages


def parse_ids(ids: Iterable[int], field: str, vocab_size: int) -> tuple[int, ...]:
    """Token ids that exist. Raises InvalidRequest naming the entry."""
    checked = tuple(ids)
    for index, token_id in enumerate(checked):
        if token_id >= vocab_size:
            raise InvalidRequest(f"{field}[{index}]", f"must be a token id below {vocab_size}, not {token_id}")
    return checked


def parse_text_options(pb: common_pb2.TextOptions) -> TextOptions:
    """How ids become text; nothing in it can be wrong."""
    skip = pb.skip_special_tokens if pb.HasField("skip_special_tokens") else True
    return TextOptions(skip_special_tokens=skip, spaces_between_special_tokens=pb.spaces_between_special_tokens)


def parse_offsets(pbs: Iterable[generation_pb2.ChoiceOffset], field: str, n: int) -> dict[int, tuple[int, int]]:
    """Where a caller stands: choice to (token_offset, text_offset). Raises InvalidRequest naming the entry."""
    offsets: dict[int, tuple[int, int]] = {}
    for index, pb in enumerate(pbs):
        if pb.choice >= n:
            raise InvalidRequest(f"{field}[{index}].choice", f"must be below {n}, not {pb.choice}")
        if pb.choice in offsets:
            raise InvalidRequest(f"{field}[{index}].choice", f"names choice {pb.choice} again")
        offsets[pb.choice] = pb.token_offset, pb.text_offset
    return offsets


def _check_model(model: str, card: ModelCard) -> None:
    if model and model != card.model_id:
        raise NotFound(f"model {model!r}; served is {card.model_id!r}")


def _generate_prompt(pb: generation_pb2.GenerateRequest, card: ModelCard) -> Prompt:
    match pb.WhichOneof("prompt"):
        case "text":
            if not pb.text:
                raise InvalidRequest("text", "must not be empty")
            return TextPrompt(pb.text)
        case "token_ids":
            if not pb.token_ids.ids:
                raise InvalidRequest("token_ids.ids", "must not be empty")
            return IdsPrompt(parse_ids(pb.token_ids.ids, "token_ids.ids", card.vocab_size))
        case _:
            raise InvalidRequest("prompt", "one of text and token_ids is needed")


def _parse(request_id: str, prompt: Prompt, options: generation_pb2.GenerationOptions, card: ModelCard) -> ValidRequest:
    if request_id and not _REQUEST_ID.fullmatch(request_id):
        raise InvalidRequest("request_id", "must be at most 128 of A-Z a-z 0-9 . _ : -")
    return ValidRequest(
        request_id=request_id,
        prompt=prompt,
        n=_int_in("options.n", options.n if options.HasField("n") else 1, 1, MAX_CHOICES),
        sampling=_parse_sampling(options.sampling, card),
        stopping=_parse_stopping(options.stopping, card),
        text=parse_text_options(options.text),
        token_info=options.output.token_info or options.output.HasField("logprobs"),
        logprobs=_parse_logprobs(options.output, "logprobs"),
        prompt_logprobs=_parse_logprobs(options.output, "prompt_logprobs"),
        timeout_ms=options.timeout_ms,
        whole=_enum("options.delivery", options.delivery, generation_pb2.Delivery) == "DELIVERY_WHOLE",
        on_disconnect=_parse_on_disconnect(options.on_disconnect),
        detach_ttl_ms=options.detach_ttl_ms,
        retain_ms=options.retain_ms,
        failover=_parse_failover(options.failover),
        constraint=_parse_constraint(options),
        priority=_int_in("options.priority", options.priority, -MAX_PRIORITY, MAX_PRIORITY),
    )


def _parse_sampling(pb: common_pb2.SamplingParams, card: ModelCard) -> Sampling:
    at = "options.sampling."

    def number(name: str, default: float, low: float, high: float, *, above_low: bool = False) -> float:
        if not pb.HasField(name):
            return default
        return _float_in(at + name, getattr(pb, name), low, high, above_low=above_low)

    return Sampling(
        temperature=number("temperature", 1.0, 0.0, MAX_TEMPERATURE),
        top_p=number("top_p", 1.0, 0.0, 1.0, above_low=True),
        top_k=_parse_top_k(pb),
        min_p=number("min_p", 0.0, 0.0, 1.0),
        repetition_penalty=number("repetition_penalty", 1.0, 0.0, 10.0, above_low=True),
        presence_penalty=number("presence_penalty", 0.0, -2.0, 2.0),
        frequency_penalty=number("frequency_penalty", 0.0, -2.0, 2.0),
        seed=pb.seed if pb.HasField("seed") else None,
        logit_bias=_parse_logit_bias(pb, card),
    )


def _parse_top_k(pb: common_pb2.SamplingParams) -> int:
    if pb.top_k < -1:
        raise InvalidRequest("options.sampling.top_k", f"must be -1 or 0 (off) or at least 1, not {pb.top_k}")
    return max(pb.top_k, 0)


def _parse_logit_bias(pb: common_pb2.SamplingParams, card: ModelCard) -> tuple[tuple[int, float], ...]:
    field = "options.sampling.logit_bias"
    if len(pb.logit_bias) > MAX_LOGIT_BIAS:
        raise InvalidRequest(field, f"must hold at most {MAX_LOGIT_BIAS} entries, not {len(pb.logit_bias)}")
    for token_id, bias in pb.logit_bias.items():
        if token_id >= card.vocab_size:
            raise InvalidRequest(field, f"must name token ids below {card.vocab_size}, not {token_id}")
        _float_in(f"{field}[{token_id}]", bias, -100.0, 100.0)
    return tuple(sorted(pb.logit_bias.items()))


def _parse_stopping(pb: common_pb2.StopConditions, card: ModelCard) -> Stopping:
    at = "options.stopping."
    if len(pb.stop) > MAX_STOPS:
        raise InvalidRequest(at + "stop", f"must hold at most {MAX_STOPS} texts, not {len(pb.stop)}")
    for index, stop in enumerate(pb.stop):
        if not 1 <= len(stop) <= MAX_STOP_LENGTH:
            raise InvalidRequest(f"{at}stop[{index}]", f"must have 1 to {MAX_STOP_LENGTH} code points, not {len(stop)}")
    if len(pb.stop_token_ids) > MAX_STOPS:
        raise InvalidRequest(at + "stop_token_ids", f"must hold at most {MAX_STOPS} ids, not {len(pb.stop_token_ids)}")
    max_tokens = pb.max_tokens if pb.HasField("max_tokens") else None
    if max_tokens == 0:
        raise InvalidRequest(at + "max_tokens", "must be at least 1")
    if max_tokens is not None and pb.min_tokens > max_tokens:
        raise InvalidRequest(at + "min_tokens", f"must be at most max_tokens ({max_tokens}), not {pb.min_tokens}")
    return Stopping(
        stop=tuple(dict.fromkeys(pb.stop)),
        stop_token_ids=parse_ids(dict.fromkeys(pb.stop_token_ids), at + "stop_token_ids", card.vocab_size),
        include_stop_in_output=pb.include_stop_in_output,
        ignore_eos=pb.ignore_eos,
        max_tokens=max_tokens,
        min_tokens=pb.min_tokens,
    )


def _parse_logprobs(pb: generation_pb2.OutputOptions, name: Literal["logprobs", "prompt_logprobs"]) -> int | None:
    if not pb.HasField(name):
        return None
    return _int_in(f"options.output.{name}", getattr(pb, name), 0, MAX_LOGPROBS)


def _parse_constraint(options: generation_pb2.GenerationOptions) -> Constraint | None:
    if not options.HasField("constraint"):
        return None
    if options.stopping.ignore_eos:
        raise InvalidRequest("options.stopping.ignore_eos", "can't stand beside constraint, which says where to end")
    return constraint_from_wire(options.constraint, "options.constraint")


def _parse_on_disconnect(value: int) -> OnDisconnect:
    name = _enum("options.on_disconnect", value, generation_pb2.OnDisconnect)
    return OnDisconnect.DETACH if name == "ON_DISCONNECT_DETACH" else OnDisconnect.ABORT


def _parse_failover(value: int) -> Failover:
    name = _enum("options.failover", value, generation_pb2.Failover)
    return Failover.NEVER if name == "FAILOVER_NEVER" else Failover.CONTINUE


def _enum(field: str, value: int, enum: object) -> str:
    """The value's name. An unknown one is refused: serving it as the default would hide what the caller meant."""
    names: dict[int, str] = {number: name for name, number in enum.items()}  # type: ignore[attr-defined]  # EnumTypeWrapper
    if value not in names:
        known = ", ".join(name for number, name in names.items() if number)
        raise InvalidRequest(field, f"must be one of {known}, not {value}")
    return names[value]


def _int_in(field: str, value: int, low: int, high: int) -> int:
    if not low <= value <= high:
        raise InvalidRequest(field, f"must be {low} to {high}, not {value}")
    return value


def _float_in(field: str, value: float, low: float, high: float, *, above_low: bool = False) -> float:
    # Written so that NaN, which fails every comparison, is refused.
    inside = low < value <= high if above_low else low <= value <= high
    if not inside or math.isinf(value):
        bounds = f"above {low:g} and at most {high:g}" if above_low else f"{low:g} to {high:g}"
        raise InvalidRequest(field, f"must be {bounds}, not {value:g}")
    return value
