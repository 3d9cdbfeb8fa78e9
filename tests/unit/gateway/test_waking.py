from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from functools import partial
from heapq import heappop, heappush
from itertools import count
from types import SimpleNamespace
from typing import Any, cast

import pytest

from gateway.answer import RemoteAnswer
from gateway.core import EventRows, Stream, StreamTable
from gateway.waker import WRITES_PER_TURN, Waker
from services.protocol.events import Completed, Delta, Finish, FinishReason, Started, Usage
from services.protocol.generation import _stream
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


STARTED = Started(request_id="r", resume_token=b"", model="m", created_unix_ms=0, prompt_tokens=1, seed=0)
END = EventRows(finishes=[(1, Finish(0, FinishReason.STOP, 0))], completions=[(1, Usage(1, 0, 0))])


def apply(table: StreamTable, answer: RemoteAnswer, rows: EventRows) -> None:
    """What a link does with a batch, without the waker's pause."""
    table.apply(rows)
    answer.stream.wake()


def answer_on(table: StreamTable) -> RemoteAnswer:
    wakeup = Wakeup()
    stream = Stream(request_id="", n=1, whole=False, wake=wakeup.set)
    table.add(1, stream)
    return RemoteAnswer(stream, wakeup, lambda answer, delivered: None)


class HandLoop:
    """A loop that runs when it is told, on a time that passes when it is told, or when a callback takes some."""

    def __init__(self) -> None:
        self.now = 0.0
        self._ready: deque[partial[object]] = deque()
        self._timers: list[tuple[float, int, partial[object]]] = []
        self._numbers = count()

    def time(self) -> float:
        return self.now

    def call_soon(self, callback: Callable[..., object], *args: Any, context: Any = None) -> Any:
        self._ready.append(partial(callback, *args))

    def call_at(self, when: float, callback: Callable[..., object], *args: Any, context: Any = None) -> Any:
        heappush(self._timers, (when, next(self._numbers), partial(callback, *args)))

    def run_until(self, until: float) -> None:
        while self._ready or (self._timers and self._timers[0][0] <= until):
            if not self._ready:
                when, _, callback = heappop(self._timers)
                self.now = max(self.now, when)
                self._ready.append(callback)
            self._ready.popleft()()
        self.now = max(self.now, until)


class Callers:
    """Streams on a loop by hand, a write to any of which takes `write_s`."""

    def __init__(self, size: int, write_s: float) -> None:
        self.loop = HandLoop()
        self.waker = Waker(cast(asyncio.AbstractEventLoop, self.loop))
        self.written: list[int] = []
        self.streams = [
            Stream(request_id="", n=1, whole=False, wake=partial(self.loop.call_soon, self._write, number, write_s))
            for number in range(size)
        ]

    def _write(self, number: int, write_s: float) -> None:
        self.loop.now += write_s
        self.written.append(number)


def test_news_after_a_pause_wake_at_once_and_news_in_a_rush_wake_once_a_little_later() -> None:
    callers = Callers(100, write_s=50e-6)
    callers.loop.now = 1.0
    callers.waker.mark(callers.streams)
    callers.loop.run_until(1.0)
    assert callers.written == list(range(100))
    for _ in range(3):
        callers.waker.mark(callers.streams)
    callers.loop.run_until(1.0)
    assert len(callers.written) == 100, "just written to: more may come and be merged"
    callers.loop.run_until(1.1)
    assert sorted(callers.written) == sorted(2 * list(range(100)))
    callers.waker.mark(callers.streams)
    callers.loop.run_until(1.1)
    assert len(callers.written) == 300


def test_a_stream_slower_than_its_moment_is_never_held_up() -> None:
    callers = Callers(1, write_s=50e-6)
    for times in range(1, 4):
        callers.loop.run_until(times * 0.02)
        callers.waker.mark(callers.streams)
        callers.loop.run_until(callers.loop.now)
        assert len(callers.written) == times


@pytest.mark.parametrize("callers_count", [64, 256, 1_024, 4_096])
@pytest.mark.parametrize("write_s", [50e-6, 100e-6])
def test_however_many_callers_there_are_half_of_the_time_is_left_for_everything_else(
    callers_count: int, write_s: float
) -> None:
    callers = Callers(callers_count, write_s)
    for step in range(1, 1_001):
        callers.loop.run_until(step * 0.01)
        callers.waker.mark(callers.streams)
    assert len(callers.written) * write_s <= 0.6 * callers.loop.now
    assert set(callers.written) == set(range(callers_count))


def test_other_work_has_its_turn_between_the_writes_of_a_flood() -> None:
    callers = Callers(1_000, write_s=50e-6)
    before = 0

    def other_work() -> None:
        nonlocal before
        before = len(callers.written)

    callers.loop.now = 1.0
    callers.waker.mark(callers.streams)
    callers.loop.call_soon(other_work)
    callers.loop.run_until(2.0)
    assert before == WRITES_PER_TURN
    assert callers.written == list(range(1_000))


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
        await asyncio.wait_for(anext(batches), 10)


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


async def test_a_reader_that_takes_a_large_batch_event_by_event_is_never_evicted() -> None:
    table, clock, evicted = StreamTable(), HandClock(), asyncio.Event()
    answer = answer_on(table)
    answer.stream.accept(STARTED, peer_epoch=1)
    watch = SlowReaders([answer], clock=clock, timeout_s=10, log=get_logger("gateway"), on_end=evicted.set)
    apply(table, answer, rows_of("a", 0))
    finish = Finish(0, FinishReason.LENGTH, 1)
    apply(table, answer, EventRows(finishes=[(1, finish)], completions=[(1, Usage(1, 0, 1))]))

    async def write(_: object) -> None:
        clock.time += 8
        watch.check()

    await _stream(answer, cast(Any, SimpleNamespace(write=write)))
    assert clock.time == 4 * 8
    assert not evicted.is_set()
