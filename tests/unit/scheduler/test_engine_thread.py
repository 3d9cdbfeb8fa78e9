import asyncio
import threading

import pytest

from services.scheduler.engine_thread import EngineThread


async def test_calls_run_one_after_the_other_on_one_thread_that_is_not_the_loop_s() -> None:
    thread, order = EngineThread(), []

    def call(number: int) -> int:
        order.append((number, threading.current_thread().name))
        return number * 2

    assert await asyncio.gather(*(thread.run(call, number) for number in range(20))) == [2 * n for n in range(20)]
    assert order == [(number, "engine") for number in range(20)]
    await thread.close()


async def test_what_a_call_raises_is_raised_to_its_caller_and_the_thread_goes_on() -> None:
    thread = EngineThread()
    with pytest.raises(ZeroDivisionError):
        await thread.run(lambda: 1 // 0)
    assert await thread.run(lambda: 5) == 5
    await thread.close()


async def test_a_cancelled_caller_leaves_the_call_to_finish_and_the_next_one_to_run() -> None:
    thread, started, go_on = EngineThread(), threading.Event(), threading.Event()

    def call() -> None:
        started.set()
        go_on.wait()

    waiting = asyncio.create_task(thread.run(call))
    await asyncio.to_thread(started.wait)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    go_on.set()
    assert await thread.run(lambda: 7) == 7
    await thread.close()


async def test_a_call_that_has_not_begun_can_be_taken_back_and_one_that_has_can_not() -> None:
    thread, started, go_on = EngineThread(), threading.Event(), threading.Event()

    def call() -> None:
        started.set()
        go_on.wait()

    first = thread.start(call)
    second, third = thread.start(lambda: "second"), thread.start(lambda: "third")
    await asyncio.to_thread(started.wait)
    assert second.take_back()
    assert not first.take_back()
    go_on.set()
    assert await third.outcome == "third"
    assert not third.take_back()
    assert not second.outcome.done()
    await thread.close()


async def test_close_waits_for_the_running_call() -> None:
    thread, finished = EngineThread(), []
    waiting = asyncio.create_task(thread.run(finished.append, 1))
    await asyncio.sleep(0)
    await thread.close()
    assert finished == [1]
    await waiting
