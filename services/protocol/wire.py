"""Events to protobuf and back: the one place where both forms of an answer's events are known."""

from __future__ import annotations

from collections.abc import Iterable
from typing import assert_never, cast

from services.protocol.events import (
    Completed,
    Delta,
    EndOfText,
    ErrorCode,
    Event,
    Failure,
    Finish,
    FinishReason,
    Started,
    StopMatch,
    StopText,
    StopToken,
    TokenInfo,
    TopLogprob,
    Usage,
)
from services.runtime.trace import TraceContext, read_context
from tailrace.v1 import common_pb2, generation_pb2


def event_to_wire(event: Event) -> generation_pb2.GenerationEvent:
    """An event of a caller's stream."""
    match event:
        case Delta():
            return generation_pb2.GenerationEvent(delta=delta_to_wire(event))
        case Started():
            return generation_pb2.GenerationEvent(started=started_to_wire(event))
        case Finish():
            return generation_pb2.GenerationEvent(finish=finish_to_wire(event))
        case Completed():
            return generation_pb2.GenerationEvent(completed=completed_to_wire(event))
        case _:
            assert_never(event)


def event_from_wire(pb: generation_pb2.GenerationEvent) -> Event | None:
    """An event of a caller's stream, read; None for a kind that a newer server may send."""
    match pb.WhichOneof("event"):
        case "delta":
            return delta_from_wire(pb.delta)
        case "started":
            return started_from_wire(pb.started)
        case "finish":
            return finish_from_wire(pb.finish)
        case "completed":
            return completed_from_wire(pb.completed)
        case _:
            return None


def started_to_wire(event: Started) -> generation_pb2.Started:
    """A Started message."""
    return generation_pb2.Started(
        request_id=event.request_id,
        resume_token=event.resume_token,
        model=event.model,
        created_unix_ms=event.created_unix_ms,
        prompt_tokens=event.prompt_tokens,
        seed=event.seed,
    )


def started_from_wire(pb: generation_pb2.Started) -> Started:
    """A Started message, read."""
    return Started(
        request_id=pb.request_id,
        resume_token=pb.resume_token,
        model=pb.model,
        created_unix_ms=pb.created_unix_ms,
        prompt_tokens=pb.prompt_tokens,
        seed=pb.seed,
    )


def delta_to_wire(event: Delta) -> generation_pb2.Delta:
    """A Delta message."""
    return generation_pb2.Delta(
        choice=event.choice,
        text=event.text,
        token_ids=event.token_ids,
        next_token_offset=event.next_token_offset,
        next_text_offset=event.next_text_offset,
        tokens=tokens_to_wire(event.tokens),
    )


def delta_from_wire(pb: generation_pb2.Delta) -> Delta:
    """A Delta message, read."""
    return Delta(
        pb.choice,
        pb.text,
        list(pb.token_ids),
        pb.next_token_offset,
        pb.next_text_offset,
        tokens_from_wire(pb.tokens),
    )


def finish_to_wire(event: Finish) -> generation_pb2.Finish:
    """A Finish message."""
    return generation_pb2.Finish(
        choice=event.choice,
        reason=reason_to_wire(event.reason),
        stop=stop_to_wire(event.stop),
        error=failure_to_wire(event.error),
        output_tokens=event.output_tokens,
    )


def finish_from_wire(pb: generation_pb2.Finish) -> Finish:
    """A Finish message, read."""
    return Finish(
        pb.choice,
        reason_from_wire(pb.reason),
        pb.output_tokens,
        stop_from_wire(pb.stop) if pb.HasField("stop") else None,
        failure_from_wire(pb.error) if pb.HasField("error") else None,
    )


def completed_to_wire(event: Completed) -> generation_pb2.Completed:
    """A Completed message."""
    usage = event.usage
    return generation_pb2.Completed(
        usage=common_pb2.Usage(
            prompt_tokens=usage.prompt_tokens,
            cached_prompt_tokens=usage.cached_prompt_tokens,
            output_tokens=usage.output_tokens,
        ),
        prompt=tokens_to_wire(usage.prompt),
    )


def completed_from_wire(pb: generation_pb2.Completed) -> Completed:
    """A Completed message, read."""
    usage, prompt = pb.usage, tuple(tokens_from_wire(pb.prompt))
    return Completed(Usage(usage.prompt_tokens, usage.cached_prompt_tokens, usage.output_tokens, prompt))


def reason_to_wire(reason: FinishReason) -> common_pb2.FinishReason:
    """A finish reason: the numbers are the same by definition."""
    return cast(common_pb2.FinishReason, reason.value)


def reason_from_wire(value: int) -> FinishReason:
    """A finish reason, read; one that a newer server may send counts as an error, never as a clean stop."""
    try:
        return FinishReason(value)
    except ValueError:
        return FinishReason.ERROR


def stop_to_wire(stop: StopMatch | None) -> common_pb2.StopMatch | None:
    """A StopMatch message."""
    match stop:
        case None:
            return None
        case StopText(text):
            return common_pb2.StopMatch(stop=text)
        case StopToken(token_id):
            return common_pb2.StopMatch(stop_token_id=token_id)
        case EndOfText(token_id):
            return common_pb2.StopMatch(eos_token_id=token_id)
        case _:
            assert_never(stop)


def stop_from_wire(pb: common_pb2.StopMatch) -> StopMatch | None:
    """A StopMatch message, read."""
    match pb.WhichOneof("match"):
        case "stop":
            return StopText(pb.stop)
        case "stop_token_id":
            return StopToken(pb.stop_token_id)
        case "eos_token_id":
            return EndOfText(pb.eos_token_id)
        case _:
            return None


def failure_to_wire(failure: Failure | None) -> common_pb2.Error | None:
    """An Error message."""
    if failure is None:
        return None
    return common_pb2.Error(code=cast(common_pb2.ErrorCode, failure.code.value), message=failure.message)


def failure_from_wire(pb: common_pb2.Error) -> Failure:
    """An Error message, read; an unknown code counts as internal."""
    try:
        code = ErrorCode(pb.code)
    except ValueError:
        code = ErrorCode.INTERNAL
    return Failure(code, pb.message)


def tokens_to_wire(tokens: Iterable[TokenInfo]) -> list[common_pb2.TokenInfo]:
    """TokenInfo messages."""
    return [
        common_pb2.TokenInfo(
            token_id=token.token_id,
            logprob=token.logprob,
            bytes=token.bytes,
            top=[
                common_pb2.TopLogprob(token_id=top.token_id, logprob=top.logprob, bytes=top.bytes) for top in token.top
            ],
        )
        for token in tokens
    ]


def tokens_from_wire(pbs: Iterable[common_pb2.TokenInfo]) -> list[TokenInfo]:
    """TokenInfo messages, read."""
    return [
        TokenInfo(
            pb.token_id,
            pb.bytes,
            pb.logprob if pb.HasField("logprob") else None,
            tuple(TopLogprob(top.token_id, top.logprob, top.bytes) for top in pb.top),
        )
        for pb in pbs
    ]


def trace_to_wire(context: TraceContext | None) -> common_pb2.TraceContext | None:
    """A TraceContext message."""
    if context is None:
        return None
    return common_pb2.TraceContext(traceparent=context.traceparent, tracestate=context.state)


def trace_from_wire(pb: common_pb2.TraceContext) -> TraceContext | None:
    """A TraceContext message, read; None when it is absent, or can't be read."""
    return read_context(pb.traceparent, pb.tracestate) if pb.traceparent else None
