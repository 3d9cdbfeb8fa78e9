"""Drives a real core over the shipped fake engine, with a clock that moves only when told to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from services.protocol.events import FinishReason
from services.scheduler.admission import Limits
from services.scheduler.batch import Plan
from services.scheduler.core import SchedulerCore
from services.scheduler.effects import Effect, Opened
from services.scheduler.engine.api import Engine, SamplingSpec
from services.scheduler.engine.fake import FakeConfig
from services.scheduler.execution import Execution
from services.scheduler.ownership import Claim, Claimed, Reconciled
from services.scheduler.publisher import Publisher
from services.scheduler.sequence import Sequence as Running
from services.scheduler.submission import ChoiceStart, Route, Submission
from services.scheduler.token_log import End, TokenLog
from tests.unit.scheduler.witness import WitnessEngine

ROUTE = Route("tokenizer-1", 7)


def submission(attempt_id: int, prompt_ids: Iterable[int] = (20, 21, 22), **changes: Any) -> Submission:
    """A valid submission of one choice with eight tokens."""
    options: dict[str, Any] = {
        "route": ROUTE,
        "choices": (ChoiceStart(0),),
        "sampling": SamplingSpec(seed=attempt_id),
        "max_tokens": 8,
    }
    return Submission(attempt_id=attempt_id, prompt_ids=tuple(prompt_ids), **(options | changes))


class Driver:
    """A scheduler without a loop: every step is a call."""

    def __init__(
        self,
        *,
        limits: Limits | None = None,
        eos_after: Callable[[Sequence[int], SamplingSpec], int | None] | None = None,
        engine: Engine | None = None,
        **config: Any,
    ) -> None:
        self.fake = WitnessEngine(FakeConfig(**config), eos_after)
        self.engine = engine or self.fake
        self.execution = Execution(self.engine)
        self.core = SchedulerCore(self.engine.info, limits or Limits())
        self.publisher = Publisher()
        self.logs: dict[tuple[int, int], TokenLog] = {}
        self.now = 100.0
        self.steps = 0
        self._plans: list[Plan] = []

    def submit(self, attempt_id: int, prompt_ids: Iterable[int] = (20, 21, 22), **changes: Any) -> list[Effect]:
        effects = self.core.submit(submission(attempt_id, prompt_ids, **changes), self.now)
        for effect in effects:
            if isinstance(effect, Opened):
                self.logs.update({(log.attempt_id, log.choice): log for log in effect.logs})
        return self._perform(effects)

    def abort(
        self, *attempt_ids: int, reason: FinishReason = FinishReason.ABORTED, sender: Route | None = None
    ) -> list[Effect]:
        return self._perform(self.core.abort(attempt_ids, reason, self.now, sender))

    def release(self, *attempt_ids: int, sender: Route | None = None) -> list[Effect]:
        return self._perform(self.core.release(attempt_ids, self.now, sender))

    def claim(self, request_id: str, owner: Route, attempt_number: int = 1, **wanted: Any) -> Claimed:
        claim = Claim(tenant="", request_id=request_id, owner=owner, attempt_number=attempt_number, **wanted)
        claimed, effects = self.core.claim(claim, self.now)
        self._perform(effects)
        return claimed

    def reconcile(self, owner: Route, highest: int, *live_ids: int) -> Reconciled:
        reconciled, effects = self.core.reconcile(owner, highest, live_ids, self.now)
        self._perform(effects)
        return reconciled

    def expire(self) -> list[Effect]:
        return self._perform(self.core.expire(self.now))

    def begin(self) -> Plan:
        """The first half of a step: events may come before `finish`."""
        self._perform(self.core.expire(self.now))
        if not self._plans:
            self._plans.append(self.core.plan())
        return self._plans[0]

    def look_ahead(self) -> Plan | None:
        """Between the two: the next step is planned already, where it can be."""
        if len(self._plans) != 1:
            return None
        plan = self.core.plan_ahead()
        self._plans += [] if plan is None else [plan]
        return plan

    def finish(self) -> None:
        """The second half."""
        plan = self._plans.pop(0)
        self._perform(self.core.apply(plan, self.execution.run(plan), self.now))
        assert not self.fake.wrongs, self.fake.wrongs
        self.steps += 1

    def step(self) -> Plan:
        plan = self.begin()
        self.finish()
        return plan

    def run(self, most_steps: int = 10_000) -> None:
        """Steps until there is nothing to do."""
        for _ in range(most_steps):
            if not self.core.has_work:
                self.core.check_integrity()
                return
            self.step()
        raise AssertionError(f"still at work after {most_steps} steps")

    def sequence(self, attempt_id: int, choice: int = 0) -> Running:
        return next(s for s in self.core.attempts[attempt_id].sequences if s.log.choice == choice)

    def ids(self, attempt_id: int, choice: int = 0) -> list[int]:
        return self.logs[attempt_id, choice].ids.tolist()

    def end(self, attempt_id: int, choice: int = 0) -> End:
        end = self.logs[attempt_id, choice].end
        assert end is not None, "it has not ended"
        return end

    def cached(self, attempt_id: int, choice: int = 0) -> int:
        return self.logs[attempt_id, choice].cached_prompt_tokens

    @property
    def free(self) -> int:
        return self.core.load().free_blocks

    @property
    def total(self) -> int:
        return self.core.load().total_blocks

    def assert_idle(self) -> None:
        """Nothing waits or runs, every block is free, and the engine knows no sequence."""
        self.core.check_integrity()
        load = self.core.load()
        assert (load.waiting_sequences, load.running_sequences) == (0, 0)
        assert load.free_blocks + load.cached_blocks == load.total_blocks
        assert self.core.open_sequences == 0
        assert not self.fake._sequences

    def _perform(self, effects: list[Effect]) -> list[Effect]:
        self.publisher.perform(effects)
        return effects


def alone(attempt_id: int, prompt_ids: Iterable[int] = (20, 21, 22), **changes: Any) -> list[int]:
    """What the same submission gives on a scheduler of its own with room for everything."""
    driver = Driver()
    driver.submit(attempt_id, prompt_ids, **changes)
    driver.run()
    return driver.ids(attempt_id)
