"""Every way in which we say no, as one tree. Pure: cores may raise these; `errors.py` turns them into statuses.

TailraceError                                         gRPC                  HTTP
 ├─ InvalidRequest(field, reason_text)                INVALID_ARGUMENT      400
 ├─ Unauthenticated(message)                          UNAUTHENTICATED       401
 ├─ PermissionDenied(message)                         PERMISSION_DENIED     403
 ├─ NotFound(what)                                    NOT_FOUND             404
 ├─ AlreadyExists(what)                               ALREADY_EXISTS        409
 ├─ Superseded(message)                               ABORTED               409
 ├─ PreconditionFailed(message)                       FAILED_PRECONDITION   412
 ├─ Overloaded(message, retry_after_s)                RESOURCE_EXHAUSTED    429
 ├─ InternalError(message)                            INTERNAL              500
 ├─ Unsupported(message)                              UNIMPLEMENTED         501
 ├─ Unavailable(message, retry_after_s)               UNAVAILABLE           503
 └─ DeadlineExceeded(message)                         DEADLINE_EXCEEDED     504
"""

from __future__ import annotations

from typing import ClassVar


class TailraceError(Exception):
    """The root: `message` is for people, `reason` (UPPER_SNAKE) is for programs and survives every hop.

    A class has a reason of its own; `reason=` says it more finely, such as QUEUE_FULL for an Overloaded.
    """

    default_reason: ClassVar[str] = "INTERNAL"

    def __init__(self, message: str, *, reason: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason or self.default_reason


class InvalidRequest(TailraceError):
    """The input breaks a rule; `field` is its path as the caller wrote it, such as "sampling.top_p"."""

    default_reason = "INVALID_REQUEST"

    def __init__(self, field: str, reason_text: str, *, reason: str = "") -> None:
        super().__init__(f"{field}: {reason_text}" if field else reason_text, reason=reason)
        self.field = field
        self.reason_text = reason_text


class NotFound(TailraceError):
    """`what`, such as "model gpt-9", is not known here."""

    default_reason = "NOT_FOUND"

    def __init__(self, what: str, *, reason: str = "") -> None:
        super().__init__(f"{what} not found", reason=reason)
        self.what = what


class AlreadyExists(TailraceError):
    """`what`, such as "request r-1", is taken, and not by an equal one."""

    default_reason = "ALREADY_EXISTS"

    def __init__(self, what: str, *, reason: str = "") -> None:
        super().__init__(f"{what} already exists", reason=reason)
        self.what = what


class Overloaded(TailraceError):
    """Full: a bound is reached; the same request may succeed after `retry_after_s` seconds."""

    default_reason = "OVERLOADED"

    def __init__(self, message: str, retry_after_s: float = 1.0, *, reason: str = "") -> None:
        super().__init__(message, reason=reason)
        self.retry_after_s = retry_after_s


class Unavailable(TailraceError):
    """Down, draining or not ready; another replica, or this one after `retry_after_s` seconds, may serve."""

    default_reason = "UNAVAILABLE"

    def __init__(self, message: str, retry_after_s: float = 1.0, *, reason: str = "") -> None:
        super().__init__(message, reason=reason)
        self.retry_after_s = retry_after_s


class DeadlineExceeded(TailraceError):
    """The caller's deadline passed before an answer."""

    default_reason = "DEADLINE_EXCEEDED"


class PreconditionFailed(TailraceError):
    """The request is right but the state it needs is not there."""

    default_reason = "PRECONDITION_FAILED"


class PermissionDenied(TailraceError):
    """The caller is known and may not do this."""

    default_reason = "PERMISSION_DENIED"


class Unauthenticated(TailraceError):
    """The caller did not prove who it is."""

    default_reason = "UNAUTHENTICATED"


class Superseded(TailraceError):
    """A newer owner, generation or epoch took this over; asking again changes nothing."""

    default_reason = "SUPERSEDED"


class Unsupported(TailraceError):
    """Well formed and understood, but this build, model or engine cannot do it."""

    default_reason = "UNSUPPORTED"


class InternalError(TailraceError):
    """A bug of ours."""

    default_reason = "INTERNAL"
