"""The step loop: plan, step, apply, publish, again; and the one door through which every other event reaches the core.

The core lives on the event loop. Only the engine runs elsewhere, on a thread of its own, so requests come, leave and
are answered while a step runs. There the next step waits in line by then, wherever it can be planned without this
one's outcome: the engine goes from one to the other, and what one brought is judged and published beside the other.
Who comes meanwhile still gets into the step in line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from services.protocol.events import FinishReason
from services.protocol.inspection import EndedRequests
from services.protocol.sender import Wakeup
from services.runtime.clock import Clock, wall_time
from services.runtime.error_tree import TailraceError, Unavailable
from services.runtime.log import get_logger
from services.runtime.metrics import SchedulerMetrics
from services.runtime.trace import NO_TRACER, Tracer
from services.scheduler import engine_thread
from services.scheduler.batch import Plan
from services.scheduler.call import STOPPING, Call, Rows
from services.scheduler.core import SchedulerCore
from services.scheduler.effects import Effect, Load, Released
from services.scheduler.engine.api import Answer, Engine
from services.scheduler.engine_thread import EngineThread
from services.scheduler.execution import Execution
from services.scheduler.measures import Measures
from services.scheduler.ownership import Claim, Claimed, Held, Reconciled
from services.scheduler.publisher import Publisher
from services.scheduler.pulse import Pulse
from services.scheduler.sequence import Attempt
from services.scheduler.spans import AttemptSpans
from services.scheduler.submission import Route, Submission
from services.scheduler.views import AttemptViews

_log = get_logger("scheduler")


@dataclass(slots=True, eq=False)
class _Step:
    """A planned step, and its place in the engine thread's line."""

    plan: Plan
    call: engine_thread.Call[list[Answer]]


class StepLoop:
    """One scheduler at work. Made inside a running event loop; every method is called on it."""

    def __init__(
        self,
        engine: Engine,
        thread: EngineThread,
        core: SchedulerCore,
        publisher: Publisher,
        clock: Clock,
        metrics: SchedulerMetrics,
        tracer: Tracer = NO_TRACER,
    ) -> None:
        self.core = core
        self.publisher = publisher
        self.pulse = Pulse()
        self.ended = EndedRequests()
        self._execution = Execution(engine)
        self._ahead: _Step | None = None
        self._clock = clock
        self._measures = Measures(metrics, core, self.pulse, clock)
        self._spans = None if tracer is NO_TRACER else AttemptSpans(tracer, core)
        self._thread = thread
        self.closed = False
        self._wakeup = Wakeup()
        self._watchers: dict[Callable[[], None], None] = {}

    def submit(self, submission: Submission) -> None:
        """Accepts an attempt. Raises like SchedulerCore.submit."""
        try:
            effects = self.core.submit(submission, self._clock.now())
        except TailraceError as error:
            self._measures.count_refusal(error)
            raise
        self._perform(effects)
        self._extend_ahead()
        self._wakeup.set()

    def abort(self, attempt_ids: Sequence[int], reason: FinishReason, sender: Route | None) -> list[int]:
        """Stops attempts; returns those that are another owner's than `sender`'s, and were left alone."""
        stale = self._stale(attempt_ids, sender)
        self._perform(self.core.abort(attempt_ids, reason, self._clock.now(), sender))
        self._wakeup.set()
        return stale

    def release(self, attempt_ids: Sequence[int], sender: Route | None) -> list[int]:
        """Stops and forgets attempts; returns those that are another owner's than `sender`'s, and were left alone."""
        stale = self._stale(attempt_ids, sender)
        self._perform(self.core.release(attempt_ids, self._clock.now(), sender))
        self._wakeup.set()
        return stale

    def find(self, tenant: str, request_id: str) -> Held:
        """What is held of a request. Raises NotFound."""
        return self.core.find(tenant, request_id, self._clock.now())

    def claim(self, claim: Claim) -> Claimed:
        """Gives a request to a new owner. Raises NotFound or Superseded."""
        claimed, effects = self.core.claim(claim, self._clock.now())
        self._perform(effects)
        self._wakeup.set()
        self._measures.count_claim()
        _log.info("request claimed", request_id=claim.request_id, by=claim.owner.tokenizer, fence=claimed.fence)
        return claimed

    def reconcile(self, owner: Route, highest_attempt_number: int, live_ids: Sequence[int]) -> Reconciled:
        """Releases what an owner does not want any more."""
        reconciled, effects = self.core.reconcile(owner, highest_attempt_number, live_ids, self._clock.now())
        self._perform(effects)
        self._measures.count_stale(len(reconciled.stale))
        self._wakeup.set()
        return reconciled

    @contextmanager
    def holding_lease(self, owner: Route) -> Iterator[None]:
        """Meanwhile the owner is known to live."""
        self.core.leases.open_call(owner)
        try:
            yield
        finally:
            self.core.leases.close_call(owner, self._clock.now())
            # The loop may rest for longer than the grace that has just begun.
            self._wakeup.set()

    def flush_prefix_cache(self) -> int:
        """Forgets every cached prefix; returns how many blocks are held all the same."""
        held = self.core.cache.flush()
        _log.info("prefix cache flushed", held_blocks=held)
        self._tell_watchers()
        return held

    def load(self) -> Load:
        """How busy it is."""
        return self.core.load()

    def open_call(self, route: Route, generation: int) -> Call:
        """A new call of a route. Raises Superseded; Unavailable once this process stops."""
        if self.closed:
            raise Unavailable("the scheduler stops", reason=STOPPING)
        call = self.publisher.open(route, generation)
        self._measures.count_call(len(call.outbox))
        return call

    def take(self, call: Call) -> Rows | None:
        """What a call is to be sent next. Raises like Call.take."""
        rows = call.take()
        if rows is not None:
            self._measures.count_sent(len(rows.sequences), len(rows.token_ids))
        return rows

    def close_call(self, call: Call) -> None:
        """It has ended."""
        self.publisher.close(call)
        self._tell_watchers()

    @contextmanager
    def watching(self, watcher: Callable[[], None]) -> Iterator[None]:
        """Meanwhile, calls `watcher` whenever something has changed: a step, an event, a call that ended."""
        self._watchers[watcher] = None
        try:
            yield
        finally:
            self._watchers.pop(watcher, None)

    async def run(self) -> None:
        """Steps until cancelled. An exception is a bug of ours and ends the process: its accounts can't be trusted."""
        while True:
            self._perform(self.core.expire(self._clock.now()))
            if self.core.has_work:
                await self._step()
            else:
                await self._rest()

    def drain(self) -> None:
        """Takes no new attempts from now on, and says so in its load."""
        self.core.drain()
        self._tell_watchers()

    def close(self) -> None:
        """After `run` was cancelled: ends every call once it was given all there is.

        What is open is left as it is: no end is invented. Its tokenizers go on with it elsewhere.
        """
        self.closed = True
        if self._spans is not None:
            self._spans.close(self._clock.now())
        if self._ahead is not None:
            self._ahead.call.take_back()  # nobody would hear of it
        self.publisher.close_all()
        self._tell_watchers()

    def _stale(self, attempt_ids: Sequence[int], sender: Route | None) -> list[int]:
        stale = self.core.stale(attempt_ids, sender)
        self._measures.count_stale(len(stale))
        return stale

    async def _step(self) -> None:
        step = self._ahead or self._start(self.core.plan())
        started_at = self._clock.now()
        self.pulse.begin(step.plan.tokens, started_at)
        self._measures.count_admitted(step.plan, started_at)
        ahead = self.core.plan_ahead()
        self._ahead = None if ahead is None else self._start(ahead)
        answers = await step.call.outcome
        now = self._clock.now()
        self.pulse.end(now)
        effects = self.core.apply(step.plan, answers, now)
        self._measures.count_step(step.plan, started_at, now)
        self._perform(effects)
        if not effects:
            self._tell_watchers()  # the last steps may end nobody, and only now is nothing in flight

    def _start(self, plan: Plan) -> _Step:
        return _Step(plan, self._thread.start(self._execution.run, plan))

    def _extend_ahead(self) -> None:
        """Somebody came: into the step that waits in line, if that has not begun."""
        if self._ahead is not None and self._ahead.call.take_back():
            self.core.extend(self._ahead.plan)
            self._ahead = self._start(self._ahead.plan)

    async def _rest(self) -> None:
        if not self.core.open_sequences:
            self._measures.check_idle()
        deadline = self.core.next_deadline
        await self._wakeup.wait(None if deadline is None else max(deadline - self._clock.now(), 0.0))

    def _perform(self, effects: Sequence[Effect]) -> None:
        self._remember(effect.attempt for effect in effects if isinstance(effect, Released))
        if self._spans is not None:
            self._spans.follow(effects, self._clock.now())
        self.publisher.perform(effects)
        self._measures.count(effects)
        if effects:
            self._tell_watchers()

    def _remember(self, released: Iterable[Attempt | None]) -> None:
        for attempt in released:
            if attempt is not None:
                shown = AttemptViews(self.core, self.publisher, self._clock.now(), wall_time(self._clock))
                self.ended.add(replace(shown.of(attempt), ended=True))

    def _tell_watchers(self) -> None:
        for watcher in self._watchers:
            watcher()
