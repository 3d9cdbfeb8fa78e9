from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from gateway.answer import RemoteAnswer
from gateway.core import EventRows, Stream, StreamTable
from gateway.waker import PAUSE_S_MAX, Waker
from services.protocol.events import Completed, Delta, Finish, FinishReason, Usage
from services.protocol.sender import Wakeup
from services.protocol.slow_readers import SlowReaders
from services.runtime.errors import Unavailable
from services.runtime.log import get_logger


class HandClock:
    """A clock that a test moves."""

    time = 0.0

    def now(self) -> float:
        return self.time

    def unix_ms(self) -> int:
        return 0


def rows_of(text: str, offset: int) -> EventRows:
    return EventRows(
        stream_ids=[1], choices=[0], token_offsets=[offset], token_counts=[1], token_ids=[offset],
        text_offsets=[offset], texts=[text],
    )  # fmt: skip


END = EventRows(finishes=[(1, Finish(0, FinishReason.STOP, 0))], completions=[(1, Usage(1, 0, 0))])


def apply(table: StreamTable, answer: RemoteAnswer, rows: EventRows) -> None:
    """What a link does with a batch, without the waker's pause."""
    table.apply(rows)
    answer.stream.wake()


def _noting(into: list[int], number: int) -> Callable[[], None]:
    return lambda: into.append(number)


def answer_on(table: StreamTable) -> RemoteAnswer:
    wakeup = Wakeup()
    stream = Stream(request_id="", n=1, whole=False, wake=wakeup.set)
    table.add(1, stream)
    return RemoteAnswer(stream, wakeup, lambda answer, delivered: None)


async def test_news_after_a_pause_wake_at_once_and_news_in_a_rush_wake_once_a_little_later() -> None:
    woken: list[int] = []
    waker = Waker()
    streams = [Stream(request_id="", n=1, whole=False, wake=_noting(woken, number)) for number in range(100)]
    waker.mark(streams)
    assert woken == list(range(100))
    for _ in range(3):
        waker.mark(streams)
    assert len(woken) == 100, "just written to: more may come and be merged"
    await asyncio.sleep(2 * PAUSE_S_MAX)
    assert sorted(woken) == sorted(2 * list(range(100)))
    waker.mark(streams)
    assert len(woken) == 300


async def test_a_stream_slower_than_its_moment_is_never_held_up() -> None:
    woken: list[int] = []
    waker = Waker()
    stream = Stream(request_id="", n=1, whole=False, wake=_noting(woken, 1))
    for count in range(1, 4):
        waker.mark([stream])
        assert len(woken) == count
        await asyncio.sleep(PAUSE_S_MAX)


async def test_a_reader_gets_what_came_while_it_wrote_in_one_batch() -> None:
    table = StreamTable()
    answer = answer_on(table)
    batches = answer.batches()
    apply(table, answer, rows_of("a", 0))
    assert await anext(batches) == [Delta(0, "a", [0], 1, 1, [])]
    apply(table, answer, rows_of("b", 1))
    apply(table, answer, rows_of("c", 2))
    assert await anext(batches) == [Delta(0, "bc", [1, 2], 3, 3, [])]


async def test_a_reader_ends_after_the_completion() -> None:
    table = StreamTable()
    answer = answer_on(table)
    batches = answer.batches()
    apply(table, answer, END)
    assert (await anext(batches))[-1] == Completed(Usage(1, 0, 0))
    assert await anext(batches, None) is None


async def test_a_reader_that_was_behind_when_its_stream_was_cut_gets_the_rest_and_then_the_reason() -> None:
    table = StreamTable()
    answer = answer_on(table)
    batches = answer.batches()
    apply(table, answer, rows_of("a", 0))
    assert await anext(batches) == [Delta(0, "a", [0], 1, 1, [])]
    apply(table, answer, rows_of("b", 1))
    answer.stream.cut_off(Unavailable("the tokenizer was restarted"))
    answer.stream.wake()
    assert await anext(batches) == [Delta(0, "b", [1], 2, 2, [])]
    with pytest.raises(Unavailable, match="was restarted"):
        await asyncio.wait_for(anext(batches), 1)


async def test_a_reader_that_does_not_come_back_is_evicted_after_the_timeout() -> None:
    table, clock, evicted = StreamTable(), HandClock(), asyncio.Event()
    answer = answer_on(table)
    answer.evict = evicted.set
    watch = SlowReaders([answer], clock=clock, timeout_s=10, log=get_logger("gateway"), on_end=lambda: None)
    batches = answer.batches()
    apply(table, answer, rows_of("a", 0))
    await anext(batches)
    for clock.time in (0.0, 9.0):
        watch.check()
    assert not evicted.is_set()
    clock.time = 10.0
    watch.check()
    assert evicted.is_set()


async def test_a_reader_that_waits_or_moves_is_never_evicted() -> None:
    table, clock, evicted = StreamTable(), HandClock(), asyncio.Event()
    answer = answer_on(table)
    answer.evict = evicted.set
    watch = SlowReaders([answer], clock=clock, timeout_s=10, log=get_logger("gateway"), on_end=lambda: None)
    batches = answer.batches()
    for step in range(5):
        apply(table, answer, rows_of("a", step))
        await anext(batches)
        clock.time += 8
        watch.check()
    waiting = asyncio.ensure_future(anext(batches))
    await asyncio.sleep(0)
    for _ in range(5):
        clock.time += 100
        watch.check()
    assert not evicted.is_set()
    apply(table, answer, END)
    await waiting
