from __future__ import annotations

from itertools import pairwise

from cli.loop import Flow, Process
from cli.timeline import spans_of
from services.protocol.hello import Hello
from services.protocol.views import Moment, ProcessView, RequestView


def spans(service: str, *, now: int = 100, over: bool = False, **moments: int) -> list[tuple[str, int, int, bool]]:
    """Name, begin, end, and whether it goes on, of one service's spans; `_` in a moment's name is a space."""
    view = RequestView(
        request_id="r",
        ended=over,
        moments=[Moment(what=what.replace("_", " "), unix_us=at) for what, at in moments.items()],
    )
    process = Process(address="a:1", hello=Hello(epoch=1), view=ProcessView(service=service, unix_us=now))
    flow = Flow(key=("", 1, 1), at={service: process}, **{service: view})  # type: ignore[arg-type]
    return [(span.name, span.start_us, span.end_us, span.open_) for span in spans_of(flow)]


def test_what_goes_on_ends_now_and_says_so() -> None:
    assert spans("scheduler", accepted=10, admitted=20) == [("queued", 10, 20, False), ("prefill", 20, 100, True)]


def test_a_whole_life_has_no_hole() -> None:
    found = spans("scheduler", accepted=10, admitted=20, first_token=30, ended=50)
    assert [name for name, *_ in found] == ["queued", "prefill", "decode", "kept for replay"]
    assert all(end == start for (_, _, end, _), (_, start, _, _) in pairwise(found))


def test_a_request_that_ended_without_a_token_has_no_span_that_waits_for_one() -> None:
    found = spans("tokenizer", over=True, opened=10, accepted=20, answer_whole=40, caller_gone=40, released=60)
    assert found == [
        ("submit", 10, 20, False),
        ("to the first token", 20, 40, False),
        ("caller takes the end", 40, 40, False),
        ("release", 40, 60, False),
    ]


def test_what_is_over_leaves_nothing_open() -> None:
    assert not any(open_ for *_, open_ in spans("scheduler", over=True, accepted=10, admitted=20, ended=50))
