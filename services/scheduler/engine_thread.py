"""The one thread on which an engine is loaded, told of sequences, and stepped."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")

ENGINE_NICENESS = 5


class EngineThread:
    """Runs calls one after the other. Made inside a running loop, and used from it alone.

    A thread pool of one worker would do the same for twice the CPU, which is paid at every step: 70 µs against 40.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._calls: SimpleQueue[tuple[asyncio.Future[Any], Callable[[], Any]] | None] = SimpleQueue()
        self._ended = self._loop.create_future()
        # A daemon: a step that hangs must not keep a process that was told to end.
        threading.Thread(target=self._work, name="engine", daemon=True).start()

    async def run(self, call: Callable[..., T], *args: Any) -> T:
        """The call's result, or what it raised. Cancelled, it leaves the call running: nobody can stop a step."""
        future: asyncio.Future[T] = self._loop.create_future()
        self._calls.put((future, partial(call, *args)))
        return await future

    async def close(self) -> None:
        """Returns when the thread has finished what it was doing and ended."""
        self._calls.put(None)
        await self._ended

    def _work(self) -> None:
        _yield_to_event_loops()
        while (job := self._calls.get()) is not None:
            future, call = job
            try:
                result = call()
            except BaseException as error:  # noqa: BLE001  # it belongs to whoever waits
                self._tell(_fail, future, error)
            else:
                self._tell(_resolve, future, result)
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
