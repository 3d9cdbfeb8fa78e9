import inspect

import grpc
import pytest
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo, RetryInfo
from grpc.aio import AioRpcError, Metadata
from grpc_status import rpc_status

from services.runtime import error_tree, errors
from services.runtime.errors import (
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
    from_rpc_error,
    http_status,
    to_status,
)

Code = grpc.StatusCode

EVERY = [
    (InvalidRequest("sampling.top_p", "must be in (0, 1]"), Code.INVALID_ARGUMENT, 400),
    (Unauthenticated("no key"), Code.UNAUTHENTICATED, 401),
    (PermissionDenied("not yours"), Code.PERMISSION_DENIED, 403),
    (NotFound("model gpt-9"), Code.NOT_FOUND, 404),
    (AlreadyExists("request r-1"), Code.ALREADY_EXISTS, 409),
    (Superseded("claimed by fence 4", reason="STALE_OWNER"), Code.ABORTED, 409),
    (PreconditionFailed("no adapter"), Code.FAILED_PRECONDITION, 412),
    (Overloaded("queue is full", retry_after_s=0.25, reason="QUEUE_FULL"), Code.RESOURCE_EXHAUSTED, 429),
    (InternalError("a bug"), Code.INTERNAL, 500),
    (Unsupported("no grammars"), Code.UNIMPLEMENTED, 501),
    (Unavailable("draining", retry_after_s=3), Code.UNAVAILABLE, 503),
    (DeadlineExceeded("too late"), Code.DEADLINE_EXCEEDED, 504),
]
EACH = pytest.mark.parametrize(("error", "code", "http"), EVERY, ids=[type(error).__name__ for error, _, _ in EVERY])


def over_the_wire(error: TailraceError) -> TailraceError:
    status = rpc_status.to_status(to_status(error))
    return from_rpc_error(AioRpcError(status.code, Metadata(), Metadata(*status.trailing_metadata), status.details))


def bare(code: grpc.StatusCode, details: str = "said by a proxy") -> TailraceError:
    return from_rpc_error(AioRpcError(code, Metadata(), Metadata(), details))


def test_every_error_of_the_tree_is_in_this_file_and_in_the_public_module() -> None:
    leaves = {cls for _, cls in inspect.getmembers(error_tree, inspect.isclass) if issubclass(cls, TailraceError)}
    assert {type(error) for error, _, _ in EVERY} == leaves - {TailraceError}
    assert {cls.__name__ for cls in leaves} <= set(errors.__all__)


def test_the_tree_itself_stands_on_the_standard_library_alone() -> None:
    imports = [line for line in inspect.getsource(error_tree).splitlines() if line.startswith(("import ", "from "))]
    assert imports == ["from __future__ import annotations", "from typing import ClassVar"]


@EACH
def test_each_error_has_its_statuses(error: TailraceError, code: grpc.StatusCode, http: int) -> None:
    assert errors.grpc_code(error) is code
    assert http_status(error) == http
    assert rpc_status.to_status(to_status(error)).code is code


@EACH
def test_reasons_are_upper_snake_and_of_our_domain(error: TailraceError, code: grpc.StatusCode, http: int) -> None:
    info = ErrorInfo()
    assert to_status(error).details[0].Unpack(info)
    assert info.domain == "tailrace"
    assert info.reason == error.reason
    assert info.reason.replace("_", "").isupper()


@EACH
def test_an_error_comes_back_as_it_was_over_three_hops(error: TailraceError, code: grpc.StatusCode, http: int) -> None:
    back = over_the_wire(over_the_wire(over_the_wire(error)))
    assert type(back) is type(error)
    assert vars(back) == vars(error)
    assert str(back) == str(error)


def test_a_field_is_carried_as_a_violation() -> None:
    violations = BadRequest()
    assert to_status(InvalidRequest("stop[3]", "must not be empty")).details[1].Unpack(violations)
    (violation,) = violations.field_violations
    assert (violation.field, violation.description) == ("stop[3]", "must not be empty")


def test_a_pause_is_carried_to_the_millisecond_rounded_up() -> None:
    retry = RetryInfo()
    assert to_status(Overloaded("full", retry_after_s=1.5001)).details[1].Unpack(retry)
    assert retry.retry_delay.ToMilliseconds() == 1501


def test_a_long_or_unsendable_text_is_made_sendable() -> None:
    long = over_the_wire(InvalidRequest("x" * 5000, "y" * 5000))
    assert len(to_status(long).SerializeToString()) < 8192
    surrogate = over_the_wire(InvalidRequest("stop", "\ud800 is no text"))
    assert isinstance(surrogate, InvalidRequest)
    assert surrogate.reason_text == "\\ud800 is no text"


@pytest.mark.parametrize("code", [code for code in Code if code is not Code.OK])
def test_every_status_without_details_becomes_an_error_with_its_text(code: grpc.StatusCode) -> None:
    error = bare(code)
    assert "said by a proxy" in error.message
    assert error.reason == type(error).default_reason


@pytest.mark.parametrize(
    ("code", "cls"),
    [
        (Code.CANCELLED, Unavailable),
        (Code.UNKNOWN, InternalError),
        (Code.DATA_LOSS, InternalError),
        (Code.OUT_OF_RANGE, InvalidRequest),
        (Code.UNAVAILABLE, Unavailable),
        (Code.RESOURCE_EXHAUSTED, Overloaded),
    ],
)
def test_a_foreign_status_becomes_its_nearest_error(code: grpc.StatusCode, cls: type[TailraceError]) -> None:
    assert type(bare(code)) is cls


def test_a_status_without_a_pause_gets_a_second() -> None:
    error = bare(Code.UNAVAILABLE)
    assert isinstance(error, Unavailable)
    assert error.retry_after_s == 1


def test_a_status_without_any_text_is_named_by_its_code() -> None:
    assert bare(Code.INTERNAL, "").message == "INTERNAL"


def test_a_reason_of_another_domain_is_not_taken_for_ours() -> None:
    status = to_status(Overloaded("full", reason="QUEUE_FULL"))
    foreign = ErrorInfo(domain="example.com", reason="RATE_LIMITED")
    status.details[0].Pack(foreign)
    wire = rpc_status.to_status(status)
    back = from_rpc_error(AioRpcError(wire.code, Metadata(), Metadata(*wire.trailing_metadata), wire.details))
    assert back.reason == "OVERLOADED"


def test_unreadable_details_are_ignored() -> None:
    trailers = Metadata(("grpc-status-details-bin", b"\xff\xff\xff"))
    error = from_rpc_error(AioRpcError(Code.NOT_FOUND, Metadata(), trailers, "no such model"))
    assert isinstance(error, NotFound)
    assert error.message == "no such model"


def test_a_subclass_counts_as_its_parent() -> None:
    class QueueFull(Overloaded):
        pass

    assert http_status(QueueFull("full")) == 429
    assert errors.grpc_code(QueueFull("full")) is Code.RESOURCE_EXHAUSTED
