"""The error tree (drawn in `error_tree.py`) on the wire: to gRPC and HTTP statuses, and back from a peer's status.

A status carries google.rpc details: `ErrorInfo` with the reason, `BadRequest` with the field, `RetryInfo` with the
pause, besides the `grpc-retry-pushback-ms` that gRPC clients obey by themselves. Reading one back gives the error that
was raised, over any number of hops. Message texts are never parsed.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, NoReturn, TypeVar

import grpc
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import DecodeError
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from google.rpc.status_pb2 import Status

from services.runtime.error_tree import (
    AlreadyExists,
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    NotFound,
    Overloaded,
    PermissionDenied,
    PreconditionFailed,
    Superseded,
    TailraceError,
    Unauthenticated,
    Unavailable,
    Unsupported,
)
from services.runtime.log import get_logger

__all__ = [
    "AlreadyExists",
    "DeadlineExceeded",
    "InternalError",
    "InvalidRequest",
    "NotFound",
    "Overloaded",
    "PermissionDenied",
    "PreconditionFailed",
    "Superseded",
    "TailraceError",
    "Unauthenticated",
    "Unavailable",
    "Unsupported",
    "abort",
    "answering",
    "from_rpc_error",
    "grpc_code",
    "http_status",
    "to_status",
]

DOMAIN = "tailrace"
DETAILS_KEY = "grpc-status-details-bin"
PUSHBACK_KEY = "grpc-retry-pushback-ms"
# The text travels twice (as grpc-message, percent-encoded, and in the details), and peers refuse trailers above 8 KiB.
MESSAGE_CHARS_MAX = 512

Code = grpc.StatusCode

_GRPC_CODES: dict[type[TailraceError], Code] = {
    InvalidRequest: Code.INVALID_ARGUMENT,
    Unauthenticated: Code.UNAUTHENTICATED,
    PermissionDenied: Code.PERMISSION_DENIED,
    NotFound: Code.NOT_FOUND,
    AlreadyExists: Code.ALREADY_EXISTS,
    Superseded: Code.ABORTED,
    PreconditionFailed: Code.FAILED_PRECONDITION,
    Overloaded: Code.RESOURCE_EXHAUSTED,
    InternalError: Code.INTERNAL,
    Unsupported: Code.UNIMPLEMENTED,
    Unavailable: Code.UNAVAILABLE,
    DeadlineExceeded: Code.DEADLINE_EXCEEDED,
}

_HTTP_STATUSES: dict[type[TailraceError], int] = {
    InvalidRequest: 400,
    Unauthenticated: 401,
    PermissionDenied: 403,
    NotFound: 404,
    AlreadyExists: 409,
    Superseded: 409,
    PreconditionFailed: 412,
    Overloaded: 429,
    InternalError: 500,
    Unsupported: 501,
    Unavailable: 503,
    DeadlineExceeded: 504,
}

# Statuses that we never send, but a proxy, the transport or a foreign server may.
_FOREIGN_CODES: dict[Code, type[TailraceError]] = {
    Code.CANCELLED: Unavailable,  # the peer or something between gave the call up; we did not
    Code.UNKNOWN: InternalError,
    Code.OUT_OF_RANGE: InvalidRequest,
    Code.DATA_LOSS: InternalError,
    Code.OK: InternalError,
}
_CLASSES: dict[Code, type[TailraceError]] = {code: cls for cls, code in _GRPC_CODES.items()} | _FOREIGN_CODES

Detail = TypeVar("Detail", ErrorInfo, BadRequest, RetryInfo)

_log = get_logger("runtime")


def grpc_code(error: TailraceError) -> grpc.StatusCode:
    """The gRPC status code of an error; a class outside the table counts as its nearest parent in it."""
    return next((_GRPC_CODES[cls] for cls in type(error).__mro__ if cls in _GRPC_CODES), Code.INTERNAL)


def http_status(error: TailraceError) -> int:
    """The HTTP status of an error, 400 to 504."""
    return next((_HTTP_STATUSES[cls] for cls in type(error).__mro__ if cls in _HTTP_STATUSES), 500)


def to_status(error: TailraceError) -> Status:
    """The error as google.rpc.Status with its details; `grpc_status.rpc_status.to_status` accepts it."""
    status = Status(code=grpc_code(error).value[0], message=_sendable(error.message))
    reason = ErrorInfo(domain=DOMAIN, reason=error.reason)
    if isinstance(error, NotFound | AlreadyExists):
        reason.metadata["what"] = _sendable(error.what)
    status.details.add().Pack(reason)
    if isinstance(error, InvalidRequest):
        violation = BadRequest.FieldViolation(field=_sendable(error.field), description=_sendable(error.reason_text))
        status.details.add().Pack(BadRequest(field_violations=[violation]))
    if isinstance(error, Overloaded | Unavailable):
        status.details.add().Pack(RetryInfo(retry_delay=_duration(error.retry_after_s)))
    return status


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: TailraceError) -> NoReturn:
    """Ends the call with the error's status, details and retry hint; always raises, as gRPC's own abort does."""
    status = to_status(error)
    trailers: list[tuple[str, str | bytes]] = [(DETAILS_KEY, status.SerializeToString())]
    if isinstance(error, Overloaded | Unavailable):
        trailers.append((PUSHBACK_KEY, str(math.ceil(error.retry_after_s * 1000))))
    await context.abort(grpc_code(error), status.message, tuple(trailers))
    raise AssertionError("abort returned")  # gRPC's abort never returns; its type stubs do not say so


def from_rpc_error(error: grpc.aio.AioRpcError) -> TailraceError:
    """The error that the peer raised: same class, reason, field, pause; a foreign status becomes its nearest class."""
    status = _details_of(error)
    cls = _CLASSES.get(error.code(), InternalError)
    message = status.message or error.details() or error.code().name
    return _rebuilt(cls, message, status)


@asynccontextmanager
async def answering(context: grpc.aio.ServicerContext[Any, Any], **fields: object) -> AsyncIterator[None]:
    """Stands around a servicer method's body and turns what it raises into the call's status.

    A TailraceError becomes its status, a peer's status is passed on with its details. Anything else is a bug of ours:
    it is logged with `fields` (give it the request_id) and answered INTERNAL without its text. Cancellation passes. A
    write to a peer who has left only ends the body: nobody waits for an answer.
    """
    try:
        yield
    except TailraceError as error:
        await abort(context, error)
    except grpc.aio.AioRpcError as error:
        await abort(context, from_rpc_error(error))
    except grpc.aio.AbortError:
        raise
    except grpc.aio.BaseError as error:
        # gRPC's own: the call is over on the other side, or this server was stopped, so there is nobody to answer.
        _log.debug("the peer left", why=str(error), **fields)
    except Exception:  # noqa: BLE001  # the process's edge
        _log.exception("servicer failed", **fields)
        await abort(context, InternalError("internal error; the server's log says more"))


def _sendable(text: str) -> str:
    """Bounded, and free of what UTF-8 cannot carry (a lone surrogate out of somebody's JSON)."""
    short = text if len(text) <= MESSAGE_CHARS_MAX else text[: MESSAGE_CHARS_MAX - 1] + "…"
    return short.encode("utf-8", "backslashreplace").decode("utf-8")


def _duration(seconds: float) -> Duration:
    duration = Duration()
    duration.FromMilliseconds(math.ceil(seconds * 1000))
    return duration


def _details_of(error: grpc.aio.AioRpcError) -> Status:
    """The status message among the trailers; an empty one where the peer sent none or something unreadable."""
    status = Status()
    for key, value in error.trailing_metadata() or ():
        if key == DETAILS_KEY and isinstance(value, bytes):
            try:
                status.ParseFromString(value)
            except DecodeError:
                return Status()
    return status


def _rebuilt(cls: type[TailraceError], message: str, status: Status) -> TailraceError:
    info = _detail(status, ErrorInfo())
    ours = info.domain == DOMAIN
    rebuilt = _blank(cls, message, status, info.metadata.get("what", message) if ours else message)
    rebuilt.message = message
    rebuilt.args = (message,)
    if ours and info.reason:
        rebuilt.reason = info.reason
    return rebuilt


def _blank(cls: type[TailraceError], message: str, status: Status, what: str) -> TailraceError:
    if issubclass(cls, InvalidRequest):
        violations = _detail(status, BadRequest()).field_violations
        return cls(violations[0].field, violations[0].description) if violations else cls("", message)
    if issubclass(cls, NotFound | AlreadyExists):
        return cls(what)
    if issubclass(cls, Overloaded | Unavailable):
        delay = _detail(status, RetryInfo(retry_delay=_duration(1.0))).retry_delay
        return cls(message, delay.ToMilliseconds() / 1000)
    return cls(message)


def _detail(status: Status, default: Detail) -> Detail:
    """The first detail of the default's type, or the default."""
    for packed in status.details:
        if packed.Is(default.DESCRIPTOR):
            found = type(default)()
            packed.Unpack(found)
            return found
    return default
