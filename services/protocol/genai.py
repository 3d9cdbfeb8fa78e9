"""What OpenTelemetry's GenAI conventions tell of a request and its answer; never a prompt, an output or a stop text.

The names are those of the conventions, so that any tool that knows them reads our spans.
"""

from __future__ import annotations

from services.protocol.answer import AnswerLog
from services.protocol.events import FinishReason, Started
from services.runtime.trace import Value
from tailrace.v1 import generation_pb2

FINISH_REASONS = {reason: reason.name.lower() for reason in FinishReason}

TIME_TO_FIRST_CHUNK = "gen_ai.response.time_to_first_chunk"
"""At the door: seconds from the call to the first output that its writer was given."""
TIME_TO_FIRST_TOKEN = "gen_ai.server.time_to_first_token"
"""Inside: seconds from the request's entry in the ledger to its first output there."""
TIME_PER_OUTPUT_TOKEN = "gen_ai.server.time_per_output_token"

NAME_CHARS_MAX = 128
"""Of what a caller calls its model and its request, before anybody has found it valid."""

_SAMPLING = ("temperature", "top_p", "frequency_penalty", "presence_penalty")
_INT_MAX = (1 << 63) - 1
_CHAT, _COMPLETION = "chat", "text_completion"


def operation_of(request: generation_pb2.GenerateRequest | generation_pb2.ChatRequest) -> str:
    """`gen_ai.operation.name`."""
    return _CHAT if isinstance(request, generation_pb2.ChatRequest) else _COMPLETION


def request_attributes(
    request: generation_pb2.GenerateRequest | generation_pb2.ChatRequest,
) -> dict[str, Value]:
    """What was asked for, as far as its caller said it."""
    options = request.options
    attributes: dict[str, Value] = {
        "gen_ai.operation.name": operation_of(request),
        "gen_ai.provider.name": "tailrace",
        "gen_ai.output.type": "json" if options.constraint.WhichOneof("kind") == "json_schema" else "text",
        "gen_ai.request.stream": options.delivery != generation_pb2.DELIVERY_WHOLE,
    }
    if request.model:
        attributes["gen_ai.request.model"] = request.model[:NAME_CHARS_MAX]
    if options.HasField("n"):
        attributes["gen_ai.request.choice.count"] = options.n
    if options.stopping.HasField("max_tokens"):
        attributes["gen_ai.request.max_tokens"] = options.stopping.max_tokens
    sampling = options.sampling
    attributes |= {f"gen_ai.request.{name}": getattr(sampling, name) for name in _SAMPLING if sampling.HasField(name)}
    if sampling.HasField("seed"):
        # Theirs are signed integers, seeds are not.
        attributes["gen_ai.request.seed"] = sampling.seed if sampling.seed <= _INT_MAX else str(sampling.seed)
    if sampling.top_k > 0:
        attributes["gen_ai.request.top_k"] = sampling.top_k
    return attributes


def started_attributes(started: Started) -> dict[str, Value]:
    """What is known at acceptance."""
    return {
        "gen_ai.response.id": started.request_id,
        "gen_ai.response.model": started.model,
        "gen_ai.usage.input_tokens": started.prompt_tokens,
    }


def answer_attributes(log: AnswerLog) -> dict[str, Value]:
    """What came of it, as far as it has an end."""
    finishes = [choice.finish for choice in log.choices if choice.finish is not None]
    attributes: dict[str, Value] = {}
    if finishes:
        attributes["gen_ai.response.finish_reasons"] = [FINISH_REASONS[finish.reason] for finish in finishes]
    if (usage := log.usage) is not None:
        attributes["gen_ai.usage.input_tokens"] = usage.prompt_tokens
        attributes["gen_ai.usage.output_tokens"] = usage.output_tokens
        attributes["gen_ai.usage.cache_read.input_tokens"] = usage.cached_prompt_tokens
    return attributes


def failure_of(log: AnswerLog) -> str:
    """`error.type` of an answer that ended with one; otherwise empty."""
    errors = (choice.finish.error for choice in log.choices if choice.finish is not None)
    return next((error.code.name for error in errors if error is not None), "")
