"""The contract's messages and statuses, read."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

import grpc.aio
from google.protobuf.message import DecodeError
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

from tailrace.client import errors
from tailrace.client.events import (
    Completed,
    Delta,
    Event,
    Finish,
    FinishReason,
    Started,
    TokenInfo,
    TopLogprob,
    Usage,
)
from tailrace.v1 import common_pb2, generation_pb2

_DETAILS_KEY = "grpc-status-details-bin"
_UNREACHABLE = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)

Detail = TypeVar("Detail", BadRequest, ErrorInfo, RetryInfo)


def read_event(pb: generation_pb2.GenerationEvent) -> Event | None:
    """An event; None for a kind that only a newer server knows."""
    match pb.WhichOneof("event"):
        case "delta":
            return _read_delta(pb.delta)
        case "started":
            return _read_started(pb.started)
        case "finish":
            return _read_finish(pb.finish)
        case "completed":
            usage = pb.completed.usage
            told = Usage(usage.prompt_tokens, usage.cached_prompt_tokens, usage.output_tokens)
            return Completed(told, _read_tokens(pb.completed.prompt))
        case _:
            return None


def read_error(error: grpc.aio.AioRpcError) -> errors.ClientError:
    """A call's status as the error that the caller should see."""
    code, message, status = error.code(), error.details() or "", _details_of(error)
    reason = _detail(status, ErrorInfo()).reason
    match code:
        case grpc.StatusCode.INVALID_ARGUMENT:
            violations = _detail(status, BadRequest()).field_violations
            return errors.InvalidRequest(violations[0].field if violations else "", message, reason=reason)
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return errors.Overloaded(message, reason=reason, retry_after_s=_retry_after_s(status))
        case grpc.StatusCode.NOT_FOUND:
            return errors.NotFound(code.name, message, reason=reason)
        case grpc.StatusCode.ALREADY_EXISTS:
            return errors.AlreadyExists(code.name, message, reason=reason)
        case _ if code in _UNREACHABLE:
            return errors.Unreachable(message, retry_after_s=_retry_after_s(status))
        case _:
            return errors.Refused(code.name, message, reason=reason)


def _read_started(pb: generation_pb2.Started) -> Started:
    return Started(
        request_id=pb.request_id,
        resume_token=pb.resume_token,
        model=pb.model,
        created_unix_ms=pb.created_unix_ms,
        prompt_tokens=pb.prompt_tokens,
        seed=pb.seed,
    )


def _read_delta(pb: generation_pb2.Delta) -> Delta:
    return Delta(
        pb.choice,
        pb.text,
        tuple(pb.token_ids),
        pb.next_token_offset,
        pb.next_text_offset,
        _read_tokens(pb.tokens) if pb.tokens else (),
    )


def _read_tokens(pbs: Iterable[common_pb2.TokenInfo]) -> tuple[TokenInfo, ...]:
    return tuple(
        TokenInfo(
            pb.token_id,
            pb.bytes,
            pb.logprob if pb.HasField("logprob") else None,
            tuple(TopLogprob(top.token_id, top.logprob, top.bytes) for top in pb.top),
        )
        for pb in pbs
    )


def _read_finish(pb: generation_pb2.Finish) -> Finish:
    kind = pb.stop.WhichOneof("match")
    stop: str | int | None = getattr(pb.stop, kind) if kind else None
    error = pb.error.message if pb.HasField("error") else None
    return Finish(pb.choice, _read_reason(pb.reason), pb.output_tokens, stop, error)


def _read_reason(number: int) -> FinishReason:
    """A reason that only a newer server knows counts as an error, never as a clean end."""
    try:
        return FinishReason(number)
    except ValueError:
        return FinishReason.ERROR


def _details_of(error: grpc.aio.AioRpcError) -> Status:
    status = Status()
    for key, value in error.trailing_metadata() or ():
        if key == _DETAILS_KEY and isinstance(value, bytes):
            try:
                status.ParseFromString(value)
            except DecodeError:
                return Status()
    return status


def _detail(status: Status, empty: Detail) -> Detail:
    for packed in status.details:
        if packed.Unpack(empty):
            break
    return empty


def _retry_after_s(status: Status) -> float:
    retry = _detail(status, RetryInfo())
    return retry.retry_delay.ToMilliseconds() / 1000 if retry.HasField("retry_delay") else 1.0
