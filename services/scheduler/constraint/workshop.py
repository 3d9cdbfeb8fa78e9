"""Where constraints are compiled: on threads beside the step loop, so many at once and for so long."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from services.protocol.request import Constraint
from services.runtime.error_tree import InvalidRequest, Overloaded
from services.scheduler.engine.api import CompiledConstraint
from services.scheduler.submission import Submission

WORKERS = 2
MAX_WAITING = 64
TIMEOUT_S = 10.0
RETRY_S = 1.0

Compile = Callable[[Constraint], CompiledConstraint]


class Workshop:
    """Made inside a running event loop. `compile_one` blocks; None where no tokenizer is known."""

    def __init__(self, compile_one: Compile | None, *, timeout_s: float = TIMEOUT_S) -> None:
        self._compile = compile_one
        self._timeout_s = timeout_s
        self._running: dict[Constraint, asyncio.Future[CompiledConstraint]] = {}
        self._threads = ThreadPoolExecutor(WORKERS, thread_name_prefix="constraint")

    async def prepare(self, submission: Submission) -> Submission:
        """The submission with its constraint compiled.

        Raises InvalidRequest for one that is wrong, or takes too long, and Overloaded while too many wait.
        """
        constraint = submission.constraint
        if constraint is None:
            return submission
        field = f"constraint.{constraint.kind.value}"
        try:
            async with asyncio.timeout(self._timeout_s):
                # A Submit that is given up is sent again, and then finds its constraint done, or still in the making.
                compiled = await asyncio.shield(self._begun(constraint))
        except TimeoutError:
            raise InvalidRequest(field, f"takes longer than {self._timeout_s:g} s to compile") from None
        return replace(submission, sampling=replace(submission.sampling, constraint=compiled))

    def close(self) -> None:
        """Takes no more; what is being compiled ends by itself."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _begun(self, constraint: Constraint) -> asyncio.Future[CompiledConstraint]:
        if constraint in self._running:
            return self._running[constraint]
        if self._compile is None:
            raise InvalidRequest("constraint", "can't be served by a scheduler without a tokenizer (--model)")
        if len(self._running) >= MAX_WAITING:
            raise Overloaded(f"{MAX_WAITING} constraints are being compiled", RETRY_S, reason="COMPILING_FULL")
        future = asyncio.get_running_loop().run_in_executor(self._threads, self._compile, constraint)
        self._running[constraint] = future
        future.add_done_callback(lambda done: self._ended(constraint, done))
        return future

    def _ended(self, constraint: Constraint, future: asyncio.Future[CompiledConstraint]) -> None:
        del self._running[constraint]
        if not future.cancelled():
            future.exception()  # nobody may be left who asks
