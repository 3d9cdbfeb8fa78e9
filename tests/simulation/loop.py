"""The event loop of one simulated process: asyncio's own tasks and futures on virtual time.

A process that is killed is a loop that never runs again: nothing is cancelled, no `finally` runs. A paused one runs
later, with everything as it was; its timers have then passed, and what was sent to it waits at its door.
"""

from __future__ import annotations

import asyncio
from asyncio import events
from collections import deque
from collections.abc import Callable, Coroutine, Generator
from contextvars import Context
from typing import Any, TypeVar

from tests.simulation.world import World

T = TypeVar("T")


class SimTask(asyncio.Task[T]):
    """A task whose place in a set depends on when it was made, not on where in memory: TaskGroup keeps a set."""

    number = 0

    def __hash__(self) -> int:
        return self.number


class ProcessLoop(asyncio.AbstractEventLoop):
    """One process's loop. Its monotonic clock began at `origin`: no two processes agree on what time it is."""

    def __init__(self, world: World, name: str, *, origin: float) -> None:
        self.world = world
        self.name = name
        self.alive = True
        self.paused = False
        self._origin = origin
        self._ready: deque[asyncio.Handle] = deque()
        self._late: tuple[list[asyncio.Handle], list[asyncio.Handle]] = ([], [])
        self._turns = False
        self._tasks: list[SimTask[Any]] = []
        self.owner: object = None

    @property
    def is_awake(self) -> bool:
        """Whether anything happens here."""
        return self.alive and not self.paused

    # -- what the world does with it

    def deliver(self, act: Callable[..., object], *args: object) -> None:
        """Something arrives from outside: it happens here, now or when the process wakes, or never."""
        handle = asyncio.Handle(act, args, self)
        if self.paused:
            self._late[0].append(handle)
        else:
            self._ready.append(handle)
            self._turn()

    def kill(self) -> None:
        """Nothing happens here any more."""
        self.alive = False
        self._ready.clear()

    def pause(self) -> None:
        """Nothing happens here until `resume`."""
        self.paused = True

    def resume(self) -> None:
        """What should have happened meanwhile happens now: what arrived, and timers, one of the two first."""
        self.paused = False
        arrived, timers = self._late
        self._late = ([], [])
        both = [*timers, *arrived] if self.world.chance(0.5) else [*arrived, *timers]
        self._ready.extend(both)
        self._turn()

    def lost_errors(self) -> list[str]:
        """What tasks died of without anybody asking."""
        ended = [task for task in self._tasks if task.done() and not task.cancelled()]
        return [f"{task.get_name()}: {task.exception()!r}" for task in ended if task._log_traceback]  # type: ignore[attr-defined]  # asyncio's own mark

    def bury(self) -> None:
        """At the end of a run: closes what still waits, so that nothing is left to the garbage collector's mercy."""
        self.alive = False
        self._ready.clear()
        events._set_running_loop(self)
        try:
            for task in self._tasks:
                if not task.done():
                    task._log_destroy_pending = False  # type: ignore[attr-defined]  # asyncio's own mark
                    _close(task.get_coro())
        finally:
            events._set_running_loop(None)
        self._tasks.clear()

    def _turn(self) -> None:
        """Runs what is ready and what that makes ready; it takes no virtual time."""
        if self._turns or not self.is_awake:
            return
        self._turns = True
        ready = self._ready
        events._set_running_loop(self)
        try:
            while ready and self.is_awake:
                handle = ready.popleft()
                if not handle._cancelled:  # type: ignore[attr-defined]  # as every loop does; `cancelled()` is slower
                    handle._run()
        finally:
            events._set_running_loop(None)
            self._turns = False

    def _timer_is_due(self, handle: asyncio.TimerHandle) -> None:
        if handle.cancelled():
            return
        if self.paused:
            self._late[1].append(handle)
        else:
            self._ready.append(handle)
            self._turn()

    # -- what asyncio asks of it

    def time(self) -> float:
        return self._origin + self.world.now

    def call_soon(  # type: ignore[override]  # typeshed's variadic generics
        self, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        if not self._turns:
            self.world.after(0.0, self._turn)
        return handle

    call_soon_threadsafe = call_soon  # type: ignore[assignment]  # likewise

    def call_later(  # type: ignore[override]  # likewise
        self, delay: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]  # likewise
        self, when: float, callback: Callable[..., object], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        timer = asyncio.TimerHandle(when, callback, args, self, context)
        self.world.at(when - self._origin, lambda: self._timer_is_due(timer))
        return timer

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(
        self,
        coro: Generator[Any, None, T] | Coroutine[Any, Any, T],
        *,
        name: object = None,
        context: Context | None = None,
    ) -> asyncio.Task[T]:
        task: SimTask[T] = SimTask.__new__(SimTask)
        task.number = len(self._tasks)
        self._tasks.append(task)
        # Its hash is needed while it is made.
        task.__init__(coro, loop=self, name=name, context=context)  # type: ignore[misc, call-overload]
        return task

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]  # likewise
        """What a thread would do takes no time."""
        future: asyncio.Future[T] = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001  # it belongs to whoever waits
            future.set_exception(error)
        return future

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Its moment passes unnoticed."""

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """What nobody caught is a bug of ours."""
        if self.alive and not self.world.over:
            error = context.get("exception")
            self.world.violated(f"{self.name}: {context.get('message')}: {error!r}")


def new_loop(world: World, name: str, *, origin: float = 0.0) -> ProcessLoop:
    """A loop without what no process of ours asks of one: sockets, subprocesses, signals."""
    return ProcessLoop(world, name, origin=origin)  # type: ignore[abstract]  # as said


def _close(coroutine: Any) -> None:
    """Ends a coroutine where it waits, and where its `finally` waits again."""
    for _ in range(50):
        try:
            coroutine.close()
        except RuntimeError:
            continue
        except BaseException:  # noqa: BLE001  # whatever a closing coroutine raises, the run is over
            return
        return
