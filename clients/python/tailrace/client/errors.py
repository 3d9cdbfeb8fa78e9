"""What can go wrong, as the caller should tell it apart.

ClientError
├── Refused             the server answered no, and nothing was generated
│   ├── InvalidRequest      a field is wrong; `field` names it
│   ├── NotFound            no such model or request
│   ├── AlreadyExists       a live request has this id
│   └── Overloaded          full; try again after `retry_after_s`
├── Unreachable         no server there, or not ready; try again after `retry_after_s`
├── StreamCut           the stream ended without Completed: what came so far is a beginning, not an answer
└── LawBroken           the server broke the stream's law; a bug of the server's
"""

from __future__ import annotations


class ClientError(Exception):
    """Everything that this package raises of its own."""


class Refused(ClientError):
    """The server answered no, and nothing was generated; `code` is gRPC's name, such as "PERMISSION_DENIED"."""

    def __init__(self, code: str, message: str, *, reason: str = "") -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.reason = reason


class InvalidRequest(Refused):
    """A field is wrong; `field` is its path in the contract, such as "options.sampling.top_p"."""

    def __init__(self, field: str, message: str, *, reason: str = "") -> None:
        super().__init__("INVALID_ARGUMENT", message, reason=reason)
        self.field = field


class NotFound(Refused):
    """No such model or request."""


class AlreadyExists(Refused):
    """A live request has this id, and it asks for something else."""


class Overloaded(Refused):
    """The server is full; it asks to be tried again after `retry_after_s` seconds."""

    def __init__(self, message: str, *, reason: str = "", retry_after_s: float = 1.0) -> None:
        super().__init__("RESOURCE_EXHAUSTED", message, reason=reason)
        self.retry_after_s = retry_after_s


class Unreachable(ClientError):
    """No server answers there, or it is not ready; try again after `retry_after_s` seconds."""

    def __init__(self, message: str, *, retry_after_s: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class StreamCut(ClientError):
    """The stream ended without Completed, and could not be taken up again.

    What came so far is the answer's beginning, never the answer.
    """


class LawBroken(ClientError):
    """The server sent what the contract forbids, such as a hole between two deltas."""
