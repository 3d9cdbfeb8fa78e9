"""Where constraints are compiled: on threads beside the step loop, so many at once and for so long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace

from services.protocol.request import Constraint
from services.runtime.error_tree import InvalidRequest, Overloaded
from services.scheduler.engine.api import CompiledConstraint
from services.scheduler.submission import Submission

WORKERS = 2
MAX_WAITING = 64
TIMEOUT_S = 4.0
"""A tokenizer repeats its Submit for five seconds, and must hear of it by then."""

RETRY_S = 1.0

TOO_MANY = "COMPILING_FULL"

Compile = Callable[[Constraint], CompiledConstraint]


@dataclass(slots=True, eq=False)
class _Making:
    """A constraint that is being compiled, or waits for a thread to be."""

    until: float
    begun: bool = False
    done: asyncio.Future[CompiledConstraint] = field(init=False)


class Workshop:
    """Made inside a running event loop. `compile_one` blocks; None where no tokenizer is known."""

    def __init__(self, compile_one: Compile | None, *, timeout_s: float = TIMEOUT_S) -> None:
        self._compile = compile_one
        self._timeout_s = timeout_s
        self._running: dict[Constraint, _Making] = {}
        self._threads = ThreadPoolExecutor(WORKERS, thread_name_prefix="constraint")

    async def prepare(self, submission: Submission) -> Submission:
        """The submission with its constraint compiled.

        Raises InvalidRequest for one that is wrong, or takes too long, and Overloaded while too many wait. A Submit
        that is given up is sent again: it finds its constraint done, or in the making, with what is left of its time.
        """
        constraint = submission.constraint
        if constraint is None:
            return submission
        making = self._begun(constraint)
        try:
            async with asyncio.timeout_at(making.until):
                compiled = await asyncio.shield(making.done)
        except TimeoutError:
            if not making.begun:
                why = f"a constraint has waited {self._timeout_s:g} s for others to be compiled"
                raise Overloaded(why, RETRY_S, reason=TOO_MANY) from None
            named = f"constraint.{constraint.kind.value}"
            raise InvalidRequest(named, f"takes longer than {self._timeout_s:g} s to compile") from None
        return replace(submission, sampling=replace(submission.sampling, constraint=compiled))

    def close(self) -> None:
        """Takes no more; what is being compiled ends by itself."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _begun(self, constraint: Constraint) -> _Making:
        if constraint in self._running:
            return self._running[constraint]
        if self._compile is None:
            raise InvalidRequest("constraint", "can't be served by a scheduler without a tokenizer (--model)")
        if len(self._running) >= MAX_WAITING:
            raise Overloaded(f"{MAX_WAITING} constraints are being compiled", RETRY_S, reason=TOO_MANY)
        loop, compile_one = asyncio.get_running_loop(), self._compile
        making = _Making(loop.time() + self._timeout_s)

        def make() -> CompiledConstraint:
            making.begun = True
            return compile_one(constraint)

        making.done = loop.run_in_executor(self._threads, make)
        self._running[constraint] = making
        making.done.add_done_callback(lambda done: self._ended(constraint, done))
        return making

    def _ended(self, constraint: Constraint, future: asyncio.Future[CompiledConstraint]) -> None:
        del self._running[constraint]
        if not future.cancelled():
            future.exception()  # nobody may be left who asks
