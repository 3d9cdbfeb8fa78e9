from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.core import CutReason, EventRows, Stream, StreamTable
from gateway.state import StreamPhase
from services.protocol.events import Completed, Delta, ErrorCode, Finish, FinishReason, Started, Usage
from services.runtime.errors import Unavailable

STARTED = Started(request_id="r", resume_token=b"", model="m", created_unix_ms=0, prompt_tokens=5, seed=0)


def table_with(*stream_ids: int, n: int = 1, whole: bool = False) -> tuple[StreamTable, list[Stream]]:
    table = StreamTable()
    streams = [Stream(request_id="", n=n, whole=whole, wake=lambda: None) for _ in stream_ids]
    for number, stream in zip(stream_ids, streams, strict=True):
        table.add(number, stream)
    return table, streams


def row(stream_id: int, offset: int, text: str, *, choice: int = 0, text_offset: int | None = None) -> EventRows:
    """One row of one token whose text has the same offset unless told otherwise."""
    return EventRows(
        stream_ids=[stream_id],
        choices=[choice],
        token_offsets=[offset],
        token_counts=[1],
        token_ids=[1000 + offset],
        text_offsets=[offset if text_offset is None else text_offset],
        texts=[text],
    )


def text_of(events: Sequence[Any]) -> str:
    return "".join(event.text for event in events if isinstance(event, Delta))


def test_rows_go_to_their_streams_and_only_those_have_news() -> None:
    table, (first, second, third) = table_with(1, 2, 3)
    rows = EventRows(
        stream_ids=[1, 3],
        choices=[0, 0],
        token_offsets=[0, 0],
        token_counts=[2, 1],
        token_ids=[7, 8, 9],
        text_offsets=[0, 0],
        texts=["ab", "c"],
    )
    assert list(table.apply(rows).touched) == [first, third]
    assert first.take() == [Delta(0, "ab", [7, 8], 2, 2, [])]
    assert third.take() == [Delta(0, "c", [9], 1, 1, [])]
    assert second.take() == []


def test_what_came_while_the_caller_was_away_is_one_delta() -> None:
    table, (stream,) = table_with(1)
    for offset, letter in enumerate("abc"):
        table.apply(row(1, offset, letter))
    assert stream.take() == [Delta(0, "abc", [1000, 1001, 1002], 3, 3, [])]


def test_a_replay_that_agrees_brings_nothing_twice() -> None:
    table, (stream,) = table_with(1)
    for offset, letter in enumerate("abc"):
        table.apply(row(1, offset, letter))
    stream.take()
    for offset, letter in enumerate("abcd"):
        assert not table.apply(row(1, offset, letter)).broken
    assert text_of(stream.take()) == "d"


@pytest.mark.parametrize(
    "contradiction",
    [
        row(1, 1, "X"),
        row(1, 5, "f"),
        row(1, 0, "b", choice=1),
        EventRows(completions=[(1, Usage(1, 0, 1))]),
    ],
    ids=["other text", "a hole", "a choice nobody asked for", "completed before its choice"],
)
def test_a_contradiction_ends_that_stream_with_an_integrity_error_and_no_other(contradiction: EventRows) -> None:
    table, (stream, neighbour) = table_with(1, 2)
    for offset, letter in enumerate("abc"):
        table.apply(row(1, offset, letter))
    broken = table.apply(contradiction).broken
    assert [item.stream for item in broken] == [stream]
    events = stream.take()
    assert text_of(events) == "abc"
    ended = events[-2]
    assert isinstance(ended, Finish)
    assert ended.reason is FinishReason.ERROR
    assert ended.error is not None
    assert ended.error.code is ErrorCode.INTEGRITY
    assert isinstance(events[-1], Completed)
    assert neighbour.take() == []


def test_after_an_integrity_error_nothing_more_is_taken_in() -> None:
    table, (stream,) = table_with(1)
    table.apply(row(1, 3, "x"))
    stream.take()
    assert list(table.apply(row(1, 0, "a")).touched) == []
    assert stream.take() == []


@pytest.mark.parametrize("cut", [True, False], ids=["cut off", "ended here"])
def test_a_tokenizer_that_comes_back_too_late_changes_nothing_of_what_was_told(cut: bool) -> None:
    # The caller is slow: its stream is still listed where it was, and that tokenizer replays it to its end.
    table, (stream,) = table_with(1)
    stream.accept(STARTED, peer_epoch=1)
    table.apply(row(1, 0, "a"))
    if cut:
        stream.cut_off(Unavailable("nobody took it in time"))
    else:
        stream.end_here(FinishReason.ABORTED)
    late = Finish(0, FinishReason.STOP, 2)
    for rows in (
        row(1, 0, "a"),
        row(1, 1, "b"),
        EventRows(finishes=[(1, late)]),
        EventRows(completions=[(1, Usage(5, 0, 2))]),
    ):
        assert not table.apply(rows).broken
    events = stream.take()
    if cut:
        assert not [event for event in events if not isinstance(event, Delta)]
        with pytest.raises(Unavailable):
            stream.take()
    else:
        assert events == [
            Delta(0, "a", [1000], 1, 1, []),
            Finish(0, FinishReason.ABORTED, 1),
            Completed(Usage(5, 0, 1)),
        ]


def test_events_of_streams_that_are_not_open_are_ignored() -> None:
    table, _ = table_with(1)
    table.discard(1)
    applied = table.apply(row(1, 0, "a"))
    assert not list(applied.touched)
    assert not applied.broken


def test_an_answer_may_be_complete_before_open_is_answered() -> None:
    table, (stream,) = table_with(1)
    table.apply(row(1, 0, "a"))
    table.apply(EventRows(finishes=[(1, Finish(0, FinishReason.STOP, 1))], completions=[(1, Usage(1, 0, 1))]))
    stream.accept(STARTED, 1)
    assert stream.phase is StreamPhase.ENDED
    assert text_of(stream.take()) == "a"
    assert stream.cursor.done


def test_a_replayed_completion_is_compared_too() -> None:
    table, _ = table_with(1)
    end = EventRows(finishes=[(1, Finish(0, FinishReason.STOP, 0))], completions=[(1, Usage(1, 0, 0))])
    table.apply(end)
    assert not table.apply(end).broken
    assert table.apply(EventRows(completions=[(1, Usage(2, 0, 0))])).broken


def test_a_cut_stream_gives_what_is_there_and_then_its_error() -> None:
    table, (stream,) = table_with(1)
    table.apply(row(1, 0, "a"))
    stream.cut_off(Unavailable("gone"))
    assert text_of(stream.take()) == "a"
    with pytest.raises(Unavailable, match="gone"):
        stream.take()


def test_a_complete_answer_is_not_cut() -> None:
    table, (stream,) = table_with(1)
    table.apply(EventRows(finishes=[(1, Finish(0, FinishReason.STOP, 0))], completions=[(1, Usage(1, 0, 0))]))
    stream.cut_off(Unavailable("gone"))
    assert isinstance(stream.take()[-1], Completed)


def test_our_own_end_finishes_every_open_choice_once_and_keeps_the_ends_that_came() -> None:
    table, (stream,) = table_with(1, n=3)
    stream.accept(STARTED, 1)
    table.apply(row(1, 0, "a", choice=2))
    table.apply(EventRows(finishes=[(1, Finish(1, FinishReason.LENGTH, 0))]))
    stream.end_here(FinishReason.ABORTED)
    events = stream.take()
    assert [(e.choice, e.reason) for e in events if isinstance(e, Finish)] == [
        (0, FinishReason.ABORTED),
        (1, FinishReason.LENGTH),
        (2, FinishReason.ABORTED),
    ]
    assert events[-1] == Completed(Usage(5, 0, 1))
    assert stream.ended_here


def test_a_whole_delivery_holds_a_choice_until_it_has_ended() -> None:
    table, (stream,) = table_with(1, whole=True)
    table.apply(row(1, 0, "a"))
    assert stream.take() == []
    table.apply(row(1, 1, "b"))
    table.apply(EventRows(finishes=[(1, Finish(0, FinishReason.STOP, 2))]))
    assert text_of(stream.take()) == "ab"


@given(
    text=st.text(max_size=30),
    replays=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=5),
    takes=st.lists(st.booleans(), min_size=30, max_size=30),
)
def test_whatever_is_replayed_and_whenever_it_is_read_the_joined_text_is_the_text(
    text: str, replays: list[tuple[int, int]], takes: list[bool]
) -> None:
    table, (stream,) = table_with(1)
    got = ""
    for offset, letter in enumerate(text):
        table.apply(row(1, offset, letter))
        for start, end in replays:
            for known in range(min(start, offset), min(end, offset)):
                table.apply(row(1, known, text[known]))
        if takes[offset]:
            got += text_of(stream.take())
    assert got + text_of(stream.take()) == text


def resumed(table: StreamTable, stream_id: int, offsets: dict[int, tuple[int, int]]) -> Stream:
    stream = Stream(request_id="r", n=None, wake=lambda: None, offsets=offsets)
    table.add(stream_id, stream)
    return stream


def test_a_resumed_answer_that_is_whole_before_attach_is_answered_has_all_its_choices() -> None:
    table = StreamTable()
    stream = resumed(table, 1, {0: (2, 2)})
    table.apply(row(1, 2, "c"))
    table.apply(row(1, 0, "x", choice=2))
    table.apply(EventRows(finishes=[(1, Finish(choice, FinishReason.STOP, 3)) for choice in range(3)]))
    applied = table.apply(EventRows(completions=[(1, Usage(1, 0, 9))]))
    assert not applied.broken
    stream.attach(STARTED, 7, n=3, whole=False)
    events = stream.take()
    assert [(e.choice, e.text) for e in events if isinstance(e, Delta)] == [(0, "c"), (2, "x")]
    assert sorted(e.choice for e in events if isinstance(e, Finish)) == [0, 1, 2]
    assert stream.cursor.done
    assert stream.phase is StreamPhase.ENDED


def test_once_measured_a_resumed_answer_gets_no_more_choices() -> None:
    table = StreamTable()
    stream = resumed(table, 1, {})
    stream.attach(STARTED, 7, n=2, whole=False)
    assert not table.apply(row(1, 0, "a", choice=1)).broken
    assert table.apply(row(1, 0, "a", choice=2)).broken


def test_no_number_of_choices_that_a_contract_forbids_is_believed() -> None:
    table = StreamTable()
    resumed(table, 1, {})
    assert table.apply(row(1, 0, "a", choice=1_000_000)).broken


def test_a_stranded_stream_knows_where_another_tokenizer_has_to_go_on() -> None:
    table, (stream,) = table_with(1)
    stream.accept(STARTED, 1)
    table.apply(row(1, 0, "a"))
    assert stream.strand()
    assert not stream.strand()
    assert stream.offsets() == {0: (1, 1)}
    table.discard(1)
    table.add(2, stream)
    stream.attach(STARTED, 5, n=1, whole=False)
    assert not stream.stranded
    assert stream.peer_epoch == 5
    table.apply(row(2, 1, "b"))
    assert text_of(stream.take()) == "ab"


def test_a_whole_answer_is_never_stranded() -> None:
    table, (stream,) = table_with(1)
    stream.accept(STARTED, 1)
    table.apply(EventRows(finishes=[(1, Finish(0, FinishReason.STOP, 0))], completions=[(1, Usage(1, 0, 0))]))
    assert not stream.strand()


def test_what_was_here_already_is_counted_in_tokens() -> None:
    table, _ = table_with(1)
    table.apply(row(1, 0, "a"))
    assert table.apply(row(1, 0, "a")).repeated_tokens == 1
    assert table.apply(row(1, 1, "b")).repeated_tokens == 0


def test_a_cut_names_the_stream_and_why() -> None:
    table, (stream,) = table_with(1)
    cuts = [(1, CutReason.CLAIMED), (9, CutReason.LOST)]
    assert table.apply(EventRows(cuts=cuts)).cuts == [(1, stream, CutReason.CLAIMED)]
