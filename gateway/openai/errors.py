"""Errors in OpenAI's form: {"error": {"message", "type", "param", "code"}}, with the parameter that is at fault."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from services.protocol.events import ErrorCode, Failure, Finish, FinishReason
from services.runtime.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    NotFound,
    Overloaded,
    TailraceError,
    Unavailable,
    http_status,
)

HTTP_ABORTED = 499
"""Not in the standard, but what proxies and their dashboards know as "ended by the caller's side". Never retried."""

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}


class RequestAborted(TailraceError):
    """The request was aborted by its id, by an operator, or by the end of the server's patience with a drain."""

    default_reason = "ABORTED"


class TooLarge(TailraceError):
    """The body is larger than this gateway takes."""

    default_reason = "BODY_TOO_LARGE"


class BodyTimeout(TailraceError):
    """The body did not arrive in time."""

    default_reason = "BODY_TIMEOUT"


_STATUSES: Mapping[type[TailraceError], int] = {RequestAborted: HTTP_ABORTED, TooLarge: 413, BodyTimeout: 408}


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """An error as it goes out: the HTTP status, OpenAI's object, and the pause before a retry, seconds."""

    status: int
    body: Mapping[str, Mapping[str, str | None]]
    retry_after_s: int | None = None


def reply_of(error: TailraceError, names: Mapping[str, str] | None = None) -> ErrorReply:
    """An error's reply; `names` maps fields of GenerationOptions to the parameters that set them."""
    status = _STATUSES.get(type(error)) or http_status(error)
    param, message, code = None, error.message, error.reason.lower()
    if isinstance(error, InvalidRequest):
        param = parameter_of(error.field, names or {}) or None
        message = f"{param}: {error.reason_text}" if param else error.reason_text
    elif isinstance(error, NotFound) and error.what.startswith("model "):
        param, code, message = "model", "model_not_found", f"there is no {error.what}"
    kind = _TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    pause = math.ceil(error.retry_after_s) if isinstance(error, Overloaded | Unavailable) else None
    return ErrorReply(status, {"error": {"message": message, "type": kind, "param": param, "code": code}}, pause)


def parameter_of(field: str, names: Mapping[str, str]) -> str:
    """The JSON name of a field of the contract: "options.stopping.stop[1]" is "stop[1]"."""
    path, bracket, index = field.removeprefix("options.").partition("[")
    if field.startswith("options."):
        return names.get(path, path.rpartition(".")[2]) + bracket + index
    if field in ("text", "token_ids") or field.startswith("token_ids.ids"):
        return "prompt" + field.removeprefix("token_ids.ids").removeprefix("token_ids").removeprefix("text")
    return field


def failure_of(finish: Finish) -> TailraceError | None:
    """What a choice that did not end by itself is to the caller; None for STOP and LENGTH, the only clean ends."""
    match finish.reason:
        case FinishReason.STOP | FinishReason.LENGTH:
            return None
        case FinishReason.DEADLINE:
            return DeadlineExceeded("the request's timeout passed before its answer was whole", reason="DEADLINE")
        case FinishReason.ABORTED:
            return RequestAborted("the request was aborted before its answer was whole")
        case FinishReason.ERROR:
            return _error_of(finish.error or Failure(ErrorCode.INTERNAL, "generation failed"))


def _error_of(failure: Failure) -> TailraceError:
    if failure.code in (ErrorCode.ENGINE_LOST, ErrorCode.QUEUE_TIMEOUT):
        return Unavailable(failure.message, reason=failure.code.name)
    return InternalError(failure.message, reason=failure.code.name)
