"""The parameters of the HTTP API as one table: name, JSON type, and where each goes in the contract's options.

A parameter that is null counts as not given. What OpenAI has and we do not serve is listed too: ignored where ignoring
it does no harm, refused by name where it would have changed the output. Any other name is refused as unknown, for a
misspelt parameter that is silently dropped changes the output as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from gateway.openai import constraints
from gateway.openai import json_types as types
from gateway.openai.json_types import Reader, WrongType, shown_name
from services.runtime.errors import InvalidRequest
from tailrace.v1 import generation_pb2


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter; `path` is its field in GenerationOptions, dotted. Of two with one path the later one wins."""

    name: str
    read: Reader
    path: str


SAMPLING = (
    Parameter("temperature", types.number, "sampling.temperature"),
    Parameter("top_p", types.number, "sampling.top_p"),
    Parameter("top_k", types.int32, "sampling.top_k"),
    Parameter("min_p", types.number, "sampling.min_p"),
    Parameter("repetition_penalty", types.number, "sampling.repetition_penalty"),
    Parameter("presence_penalty", types.number, "sampling.presence_penalty"),
    Parameter("frequency_penalty", types.number, "sampling.frequency_penalty"),
    Parameter("seed", types.seed, "sampling.seed"),
    Parameter("logit_bias", types.bias_by_token, "sampling.logit_bias"),
)
STOPPING = (
    Parameter("stop", types.one_or_more(types.text), "stopping.stop"),
    Parameter("stop_token_ids", types.list_of(types.uint32), "stopping.stop_token_ids"),
    Parameter("include_stop_str_in_output", types.boolean, "stopping.include_stop_in_output"),
    Parameter("include_stop_in_output", types.boolean, "stopping.include_stop_in_output"),
    Parameter("ignore_eos", types.boolean, "stopping.ignore_eos"),
    Parameter("max_tokens", types.uint32, "stopping.max_tokens"),
    Parameter("min_tokens", types.uint32, "stopping.min_tokens"),
)
OUTPUT = (
    Parameter("skip_special_tokens", types.boolean, "text.skip_special_tokens"),
    Parameter("spaces_between_special_tokens", types.boolean, "text.spaces_between_special_tokens"),
    Parameter("n", types.uint32, "n"),
    Parameter("timeout_ms", types.uint32, "timeout_ms"),
    Parameter("priority", types.int32, "priority"),
)
CONSTRAINTS = (
    Parameter("response_format", constraints.response_format, "constraint.json_schema"),
    Parameter("guided_json", constraints.schema, "constraint.json_schema"),
    Parameter("guided_regex", types.text, "constraint.regex"),
    Parameter("guided_choice", types.list_of(types.text), "constraint.choices.texts"),
    Parameter("guided_grammar", types.text, "constraint.grammar"),
)
DURABILITY = (
    Parameter("on_disconnect", types.one_of("ON_DISCONNECT_", generation_pb2.OnDisconnect), "on_disconnect"),
    Parameter("detach_ttl_ms", types.uint32, "detach_ttl_ms"),
    Parameter("retain_ms", types.uint32, "retain_ms"),
    Parameter("failover", types.one_of("FAILOVER_", generation_pb2.Failover), "failover"),
)

COMMON = (*SAMPLING, *STOPPING, *OUTPUT, *CONSTRAINTS, *DURABILITY)
CHAT = (
    *COMMON,
    Parameter("max_completion_tokens", types.uint32, "stopping.max_tokens"),
    Parameter("top_logprobs", types.uint32, "output.logprobs"),
)
COMPLETIONS = (*COMMON, Parameter("logprobs", types.uint32, "output.logprobs"))

IGNORED = frozenset(
    {
        "metadata",
        "moderation",
        "parallel_tool_calls",
        "prediction",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
    }
)
"""What OpenAI has and can't change the output here: labels, storage, billing, caches, and the use of absent tools."""

NEUTRAL: Mapping[str, tuple[object, ...]] = {
    "audio": (),
    "best_of": (1,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "reasoning_effort": ("none",),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "verbosity": ("medium",),
    "web_search_options": (),
}
"""What OpenAI has, would change the output, and isn't served; with the values (besides null) that ask for nothing."""


@dataclass(frozen=True, slots=True)
class Given:
    """The parameters of one request in the contract's form, and under which name each path was given."""

    options: generation_pb2.GenerationOptions
    names: dict[str, str]


def read_parameters(body: Mapping[str, Any], table: Iterable[Parameter], structural: frozenset[str]) -> Given:
    """Reads every parameter that is given. `structural` names the fields that the endpoint reads itself.

    Raises InvalidRequest naming the first parameter that is unknown, not served, or of a wrong type.
    """
    by_name = {parameter.name: parameter for parameter in table}
    for name, value in body.items():
        if name not in by_name and name not in structural:
            _refuse_unless_harmless(name, value, (*by_name, *structural))
    options = generation_pb2.GenerationOptions()
    names: dict[str, str] = {}
    for parameter in by_name.values():
        value = body.get(parameter.name)
        read = None if value is None else read_value(parameter.name, parameter.read, value)
        if read is not None:
            if parameter in CONSTRAINTS and options.HasField("constraint"):
                raise InvalidRequest(parameter.name, "can't stand beside another constraint of the output")
            _put(options, parameter.path, read)
            names[parameter.path] = parameter.name
    return Given(options, names)


def read_value(name: str, read: Reader, value: Any) -> Any:
    """One value, read. Raises InvalidRequest naming the parameter."""
    try:
        return read(value)
    except WrongType as wrong:
        raise InvalidRequest(name + wrong.at, wrong.reason_text) from None


def _refuse_unless_harmless(name: str, value: object, known: Iterable[str]) -> None:
    if name in IGNORED or (name in NEUTRAL and (value is None or value in NEUTRAL[name])):
        return
    if name in NEUTRAL:
        raise InvalidRequest(name, "is not served yet; leave it out", reason="UNSUPPORTED_PARAMETER")
    near = get_close_matches(name, known, n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    raise InvalidRequest(shown_name(name), f"is not a parameter of this API{hint}", reason="UNKNOWN_PARAMETER")


def _put(options: generation_pb2.GenerationOptions, path: str, value: Any) -> None:
    *parents, field = path.split(".")
    target: Any = options
    for parent in parents:
        target = getattr(target, parent)
    if isinstance(value, dict):
        getattr(target, field).update(value)
    elif isinstance(value, list):
        target.SetInParent()  # an empty one is given too
        getattr(target, field).extend(value)
    else:
        setattr(target, field, value)
