from __future__ import annotations

import asyncio

from gateway.answer import RemoteAnswer
from gateway.core import EventRows, Stream, StreamTable
from gateway.slow_readers import SlowReaders
from gateway.waker import WOKEN_PER_TURN, Waker
from services.protocol.events import Completed, Delta, Finish, FinishReason, Usage
from services.protocol.sender import Wakeup


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


def answer_on(table: StreamTable) -> RemoteAnswer:
    wakeup = Wakeup()
    stream = Stream(1, request_id="", n=1, whole=False, wake=wakeup.set)
    table.add(stream)
    return RemoteAnswer(stream, wakeup, lambda answer, delivered: None)


async def test_an_idle_waker_wakes_at_once_and_a_busy_one_a_few_per_turn() -> None:
    woken: list[int] = []
    waker = Waker()
    streams = [
        Stream(number, request_id="", n=1, whole=False, wake=lambda number=number: woken.append(number))  # type: ignore[misc]
        for number in range(3 * WOKEN_PER_TURN)
    ]
    waker.mark(streams)
    assert len(woken) == WOKEN_PER_TURN
    waker.mark(streams)
    assert len(woken) == WOKEN_PER_TURN, "those that wait already are not put in twice"
    for _ in range(6):
        await asyncio.sleep(0)
    assert woken == [*range(3 * WOKEN_PER_TURN), *range(WOKEN_PER_TURN)]


async def test_a_reader_gets_what_came_while_it_wrote_in_one_batch() -> None:
    table = StreamTable()
    batches = answer_on(table).batches()
    table.apply(rows_of("a", 0))
    assert await anext(batches) == [Delta(0, "a", [0], 1, 1, [])]
    table.apply(rows_of("b", 1))
    table.apply(rows_of("c", 2))
    assert await anext(batches) == [Delta(0, "bc", [1, 2], 3, 3, [])]


async def test_a_reader_ends_after_the_completion() -> None:
    table = StreamTable()
    batches = answer_on(table).batches()
    table.apply(END)
    assert (await anext(batches))[-1] == Completed(Usage(1, 0, 0))
    assert await anext(batches, None) is None


async def test_a_reader_that_does_not_come_back_is_evicted_after_the_timeout() -> None:
    table, clock, evicted = StreamTable(), HandClock(), asyncio.Event()
    answer = answer_on(table)
    answer.evict = evicted.set
    watch = SlowReaders([answer], clock=clock, timeout_s=10)
    batches = answer.batches()
    table.apply(rows_of("a", 0))
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
    watch = SlowReaders([answer], clock=clock, timeout_s=10)
    batches = answer.batches()
    for step in range(5):
        table.apply(rows_of("a", step))
        await anext(batches)
        clock.time += 8
        watch.check()
    waiting = asyncio.ensure_future(anext(batches))
    await asyncio.sleep(0)
    for _ in range(5):
        clock.time += 100
        watch.check()
    assert not evicted.is_set()
    table.apply(END)
    answer.stream.wake()
    await waiting
