"""The one thread on which an engine is loaded, told of sequences, and stepped."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Call(Generic[T]):
    """A call that was put in line; `outcome` is its result, or what it raised."""

    def __init__(self, work: Callable[[], T], outcome: asyncio.Future[T]) -> None:
        self.work = work
        self.outcome = outcome
        self._free = [True]

    def begin(self) -> bool:
        """Whether whoever asks has it for himself: the first one does, on whatever thread."""
        try:
            return self._free.pop()
        except IndexError:
            return False

    def take_back(self) -> bool:
        """Whether it has not begun; then it never will."""
        return self.begin()


ENGINE_NICENESS = 5


class EngineThread:
    """Runs calls one after the other. Made inside a running loop, and used from it alone.

    A thread pool of one worker would do the same for twice the CPU, which is paid at every step: 70 µs against 40.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._calls: SimpleQueue[Call[Any] | None] = SimpleQueue()
        self._ended = self._loop.create_future()
        # A daemon: a step that hangs must not keep a process that was told to end.
        threading.Thread(target=self._work, name="engine", daemon=True).start()

    def start(self, work: Callable[..., T], *args: Any) -> Call[T]:
        """Puts a call in line, behind those that were started before."""
        call = Call(partial(work, *args), self._loop.create_future())
        self._calls.put(call)
        return call

    async def run(self, work: Callable[..., T], *args: Any) -> T:
        """The call's result, or what it raised. Cancelled, it leaves the call running: nobody can stop a step."""
        return await self.start(work, *args).outcome

    async def close(self) -> None:
        """Returns when the thread has finished what it was doing and ended."""
        self._calls.put(None)
        await self._ended

    def _work(self) -> None:
        _yield_to_event_loops()
        while (call := self._calls.get()) is not None:
            if not call.begin():
                continue
            try:
                result = call.work()
            except BaseException as error:  # noqa: BLE001  # it belongs to whoever waits
                self._tell(_fail, call.outcome, error)
            else:
                self._tell(_resolve, call.outcome, result)
        self._tell(_resolve, self._ended, None)

    def _tell(self, how: Callable[..., None], future: asyncio.Future[Any], outcome: object) -> None:
        try:
            self._loop.call_soon_threadsafe(how, future, outcome)
        except RuntimeError:
            # The loop is closed: nobody waits any more.
            self._calls.put(None)


def _yield_to_event_loops() -> None:
    """Lowers this thread's priority, and so that of the threads which its engine starts.

    A step keeps every core busy, and what it computes still has to get out: beside a prefill the loop's 99th percentile
    of lag halves. Where threads have no priority of their own nothing is changed.
    """
    if sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), ENGINE_NICENESS)


def _resolve(future: asyncio.Future[Any], result: object) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
