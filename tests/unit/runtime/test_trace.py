from __future__ import annotations

import pytest

from services.runtime.trace import NO_TRACER, TraceContext, context_of, read_context, read_headers

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"00-{TRACE}-{SPAN}-01"


def test_a_traceparent_is_read_and_written_again() -> None:
    context = read_context(PARENT, "vendor=1,other=2")
    assert context == TraceContext(TRACE, SPAN, 1, "vendor=1,other=2")
    assert context.traceparent == PARENT


@pytest.mark.parametrize(
    "bad",
    [
        "",
        "nonsense",
        PARENT.upper(),
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE[1:]}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-1",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE}-{SPAN}-01x",
        f"cc-{TRACE}-{SPAN}-01.more",
    ],
)
def test_what_the_standard_has_nobody_trust_is_no_context(bad: str) -> None:
    assert read_context(bad, "vendor=1") is None


def test_a_later_version_is_read_as_the_first() -> None:
    assert read_context(f"cc-{TRACE}-{SPAN}-01-more") == read_context(PARENT)


def test_a_tracestate_that_is_too_long_is_left_out_and_the_rest_stands() -> None:
    assert read_context(PARENT, "v=" + "x" * 511) == read_context(PARENT)


def test_several_tracestates_are_one_and_several_traceparents_are_none() -> None:
    context = read_headers([PARENT], ["a=1", "b=2"])
    assert context is not None
    assert context.state == "a=1,b=2"
    assert read_headers([PARENT, PARENT], []) is None
    assert read_headers([], ["a=1"]) is None


def test_without_tracing_what_came_is_handed_on() -> None:
    caller = read_context(PARENT)
    assert context_of(NO_TRACER.door("chat", caller, 0.0), caller) is caller
