"""What the scheduler counts: per step and per end, never per token; gauges are read when somebody asks."""

from __future__ import annotations

from collections.abc import Iterable

from services.runtime.clock import Clock
from services.runtime.error_tree import TailraceError
from services.runtime.log import get_logger
from services.runtime.metrics import FINISH_REASONS, STEP_KINDS, SchedulerMetrics
from services.scheduler.batch import Plan
from services.scheduler.core import SchedulerCore
from services.scheduler.effects import Effect, Ended, LeaseEnded, Opened
from services.scheduler.ownership import STALE_OWNER
from services.scheduler.pulse import Pulse
from services.scheduler.sequence import Sequence

_log = get_logger("scheduler")


class Measures:
    """The scheduler's metrics, bound to its core."""

    def __init__(self, metrics: SchedulerMetrics, core: SchedulerCore, pulse: Pulse, clock: Clock) -> None:
        self._metrics = metrics
        self._core = core
        self._preemptions = 0
        self._ended = {reason: metrics.ended_total.labels(reason) for reason in FINISH_REASONS}
        self._step_seconds = {kind: metrics.step_seconds.labels(kind) for kind in STEP_KINDS}
        metrics.waiting.set_function(lambda: core.load().waiting_sequences)
        metrics.running.set_function(lambda: core.load().running_sequences)
        metrics.blocks_free.set_function(lambda: core.load().free_blocks)
        metrics.blocks_cached.set_function(lambda: core.load().cached_blocks)
        metrics.blocks_capacity.set_function(lambda: core.load().total_blocks)
        metrics.log_sequences.set_function(lambda: core.known.held)
        metrics.tombstones.set_function(lambda: len(core.known.tombstones))
        metrics.unsent_tokens.set_function(lambda: _unsent_tokens(core))
        metrics.oldest_attempt_age_seconds.set_function(lambda: _oldest_age_s(core, clock.now()))
        metrics.running_step_seconds.set_function(lambda: clock.now() - (pulse.started_at or clock.now()))

    def count_refusal(self, error: TailraceError) -> None:
        """A Submit was refused."""
        self._metrics.refused_total.labels(error.reason).inc()
        self.count_stale(error.reason == STALE_OWNER)

    def count_sent(self, rows: int, tokens: int) -> None:
        """A message went to a route; where it has more tokens than rows, its reader was slow or a step drafted."""
        if tokens > rows:
            self._metrics.merged_tokens_total.inc(tokens - rows)

    def count_call(self, replayed: int) -> None:
        """A route was opened, and is sent these sequences from token 0."""
        self._metrics.replayed_sequences_total.inc(replayed)

    def count_claim(self) -> None:
        """A request was given to another owner."""
        self._metrics.claims_total.inc()

    def count_stale(self, attempts: int) -> None:
        """So many attempts were named by somebody who does not own them any more."""
        if attempts:
            self._metrics.stale_owner_total.inc(attempts)

    def count(self, effects: Iterable[Effect]) -> None:
        """Sequences were accepted, or ended; a lease ended."""
        for effect in effects:
            if isinstance(effect, Opened):
                self._metrics.accepted_total.inc(len(effect.logs))
            elif isinstance(effect, Ended):
                for sequence in effect.sequences:
                    self._count_end(sequence)
            elif isinstance(effect, LeaseEnded):
                owner = effect.owner
                self._metrics.leases_expired_total.inc()
                _log.warning("lease is over", tokenizer=owner.tokenizer, attempts=len(effect.attempt_ids))

    def count_admitted(self, plan: Plan, started_at: float) -> None:
        """A step begins, the first one of some sequences: whoever asks meanwhile must not be told that they wait."""
        for sequence in plan.admitted:
            if not sequence.admitted_at:
                sequence.admitted_at = started_at
                self._metrics.queue_seconds.observe(started_at - sequence.attempt.arrived_at)

    def count_step(self, plan: Plan, started_at: float, now: float) -> None:
        """A step was run."""
        if not plan.slices:
            return
        prefilled = sum(tokens for _, tokens in plan.prefills)
        kind = "decode" if not plan.prefills else "prefill" if prefilled == plan.tokens else "mixed"
        self._step_seconds[kind].observe(now - started_at)
        self._metrics.batch_size.observe(len(plan.slices))
        self._metrics.output_tokens_total.inc(plan.drawn)
        if plan.drafted:
            self._metrics.drafted_tokens_total.inc(plan.drafted)
            self._metrics.accepted_tokens_total.inc(plan.accepted)
        if prefilled:
            self._metrics.prompt_tokens_total.inc(prefilled)
        for sequence, _ in plan.prefills:
            if sequence.log.ids and not sequence.first_token_at:
                sequence.first_token_at = now
                self._metrics.prefill_seconds.observe(now - sequence.admitted_at)
        preemptions = self._core.batch.preemptions
        if preemptions != self._preemptions:
            self._metrics.preemptions_total.inc(preemptions - self._preemptions)
            self._preemptions = preemptions

    def _count_end(self, sequence: Sequence) -> None:
        end = sequence.log.end
        assert end is not None
        self._ended[end.reason.name].inc()
        if cached := sequence.log.cached_prompt_tokens:
            self._metrics.cached_tokens_total.inc(cached)
        if sequence.first_token_at:
            self._metrics.decode_seconds.observe(sequence.changed_at - sequence.first_token_at)

    def check_idle(self) -> None:
        """Checks that an idle core holds nothing. A failure is counted, then raised: nothing here can be trusted."""
        try:
            self._core.check_idle()
        except AssertionError as error:
            self._metrics.integrity_failures_total.inc()
            _log.error("the block accounts are wrong", exc=error)
            raise


def _unsent_tokens(core: SchedulerCore) -> int:
    """Of sequences that a route reads."""
    logs = [sequence.log for attempt in list(core.attempts.values()) for sequence in attempt.sequences]
    return sum(len(log.ids) - log.cursor.offset for log in logs if log.cursor is not None)


def _oldest_age_s(core: SchedulerCore, now: float) -> float:
    oldest = next(iter(list(core.attempts.values())), None)
    return 0.0 if oldest is None else now - oldest.arrived_at
