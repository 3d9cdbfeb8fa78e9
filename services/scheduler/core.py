"""The scheduler's decisions, without a thread, a socket or a clock: events in, effects out.

One caller drives it: `plan`, the engine's step, `apply`, and again. While a step is in flight the next one may be
planned (`plan_ahead`); steps run and are applied in the order of their plans. All else (submit, abort, release, expire)
may come between; a sequence that is in a step then ends when the next one is applied.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as AnySequence
from functools import partial
from itertools import count

from services.protocol.events import FinishReason
from services.runtime.error_tree import PreconditionFailed, Unavailable
from services.scheduler.admission import EndRate, Limits, Tombstones, check_load, output_limit
from services.scheduler.attempts import Attempts
from services.scheduler.batch import Batch, Plan
from services.scheduler.deadlines import Deadlines
from services.scheduler.effects import Effect, Ended, LeaseEnded, Load, Moved, Opened, Progressed, Released
from services.scheduler.ending import cut_short, failure_end, gave_up_waiting, natural_end
from services.scheduler.engine.api import (
    NO_LOGPROBS,
    Answer,
    EngineInfo,
    Failed,
    PromptLogprobs,
    Sampled,
    SequenceKey,
    Speculated,
)
from services.scheduler.kv.pool import BlockPool
from services.scheduler.kv.prefix_cache import PrefixCache
from services.scheduler.leases import Leases
from services.scheduler.opening import open_attempt
from services.scheduler.ownership import Claim, Claimed, Held, Ownership, Reconciled
from services.scheduler.sequence import Attempt, Sequence
from services.scheduler.state import (
    AttemptEvent,
    AttemptPhase,
    SequenceEvent,
    SequencePhase,
    next_attempt_phase,
)
from services.scheduler.submission import Route, Submission
from services.scheduler.token_log import End, TokenLog


class SchedulerCore:
    """All attempts and sequences of one scheduler. Times are seconds on one monotonic clock."""

    def __init__(self, info: EngineInfo, limits: Limits) -> None:
        self.info = info
        self.limits = limits
        self.stepped_at = 0.0
        pool = BlockPool(info.total_blocks)
        self.cache = PrefixCache(pool, info.block_size, enabled=limits.prefix_cache)
        self.batch = Batch(self.cache, limits, info.draft_tokens)
        self.known = Attempts(Tombstones(ttl_s=limits.tombstone_ttl_s, max_count=limits.max_tombstones))
        self._ownership = Ownership(limits.lease_grace_s)
        self._rate = EndRate()
        self._ended: list[Sequence] = []
        self._deadlines = Deadlines()
        self._leaving: dict[SequenceKey, tuple[Sequence, FinishReason]] = {}
        self._steps: deque[Plan] = deque()
        self._keys = map(SequenceKey, count(1))
        self._open = 0
        self._draining = False

    @property
    def attempts(self) -> Mapping[int, Attempt]:
        """Those that are not released, by id, oldest first."""
        return self.known.by_id

    @property
    def has_work(self) -> bool:
        """Whether a step is due."""
        return bool(self._steps) or self.batch.has_work

    @property
    def open_sequences(self) -> int:
        """Sequences that have not ended."""
        return self._open

    @property
    def leases(self) -> Leases:
        """For how long attempts are held for their owners."""
        return self._ownership.leases

    @property
    def next_deadline(self) -> float | None:
        """When `expire` should be called at the latest."""
        moments = (self._deadlines.next, self.leases.next_expiry)
        return min((moment for moment in moments if moment is not None), default=None)

    def fence_of(self, attempt: Attempt) -> int:
        """The highest fence known of its request."""
        return self._ownership.fence_of(attempt.submission)

    def load(self) -> Load:
        """Where it stands now."""
        return self.batch.load(len(self._leaving), draining=self._draining)

    def drain(self) -> None:
        """Takes no new attempts from now on."""
        self._draining = True

    def submit(self, submission: Submission, now: float) -> list[Effect]:
        """Accepts an attempt; a known one is accepted again, with no effect.

        Raises InvalidRequest for what can never be served, PreconditionFailed for a released attempt, Superseded for a
        request that was claimed, Overloaded, Unavailable while draining.
        """
        self.known.tombstones.forget_old(now)
        phase = self.known.phase(submission.attempt_id)
        if next_attempt_phase(phase, AttemptEvent.SUBMIT) is AttemptPhase.RELEASED:
            raise PreconditionFailed(f"attempt {submission.attempt_id:#x} was released before it came")
        self._ownership.check_fence(submission)
        if phase is not AttemptPhase.UNKNOWN:
            return []
        if self._draining:
            raise Unavailable("the scheduler takes no new work: it is being stopped", reason="DRAINING")
        limit = output_limit(submission, self.info)
        retry_after_s = partial(self._rate.retry_after_s, now=now)
        check_load(submission, self.limits, self._open, self.known.held, retry_after_s)
        return self._accept(open_attempt(submission, limit, self.info, self.limits.policy, self._keys, now), now)

    def stale(self, attempt_ids: Iterable[int], sender: Route | None) -> list[int]:
        """Those that are, or were until their release, another owner's than `sender`'s; None may do all with any."""
        if sender is None:
            return []
        return [one for one in attempt_ids if self.known.owner_of(one) not in (None, sender)]

    def abort(
        self, attempt_ids: Iterable[int], reason: FinishReason, now: float, sender: Route | None = None
    ) -> list[Effect]:
        """Stops attempts: at once where no step uses them, otherwise when it is applied. Unknown ones are buried.

        Those that are stale for `sender` are left alone.
        """
        logs: list[TokenLog] = []
        for attempt_id in attempt_ids:
            attempt = self.attempts.get(attempt_id)
            if attempt is None:
                self.known.bury(attempt_id, AttemptEvent.ABORT, now)
            elif sender in (None, attempt.owner):
                attempt.move(AttemptEvent.ABORT)
                logs += self._stop(attempt, reason, now)
        return self._effects(logs)

    def release(self, attempt_ids: Iterable[int], now: float, sender: Route | None = None) -> list[Effect]:
        """Stops and forgets attempts; each leaves a tombstone. Those that are stale for `sender` are left alone."""
        effects: list[Effect] = []
        for attempt_id in attempt_ids:
            attempt = self.attempts.get(attempt_id)
            if attempt is None:
                self.known.bury(attempt_id, AttemptEvent.RELEASE, now)
                effects.append(Released(attempt_id, None))
            elif sender in (None, attempt.owner):
                effects.append(self._forget(attempt, now))
        self._deadlines.prune(self.attempts, len(self.attempts))
        return effects + self._effects([])

    def find(self, tenant: str, request_id: str, now: float) -> Held:
        """What is held of a request, and whether its owner is there. Raises NotFound."""
        return self._ownership.find(tenant, request_id, now)

    def claim(self, claim: Claim, now: float) -> tuple[Claimed, list[Effect]]:
        """Gives a request, with all its attempts, ended ones too, to a new owner. Raises NotFound or Superseded."""
        claimed, moved = self._ownership.claim(claim, now)
        return claimed, [
            Moved(attempt.submission.attempt_id, old, claim.owner, [sequence.log for sequence in attempt.sequences])
            for attempt, old in moved
        ]

    def reconcile(
        self, owner: Route, highest_attempt_number: int, live_ids: Iterable[int], now: float
    ) -> tuple[Reconciled, list[Effect]]:
        """Releases the owner's attempts up to that number which are not live; a live one that is missing is buried."""
        live = dict.fromkeys(live_ids)
        owned = [self.attempts[attempt_id] for attempt_id in self.leases.attempts_of(owner)]
        unwanted = [
            attempt.submission.attempt_id
            for attempt in owned
            if attempt.number <= highest_attempt_number and attempt.submission.attempt_id not in live
        ]
        stale = self.stale(live, owner)
        missing = [attempt_id for attempt_id in live if attempt_id not in self.attempts and attempt_id not in stale]
        for attempt_id in missing:
            # It counts as lost from now on, so it must not begin either.
            self.known.bury(attempt_id, AttemptEvent.RELEASE, now)
        reconciled = Reconciled(tuple(unwanted), tuple(missing), tuple(stale))
        return reconciled, self.release(unwanted, now)

    def expire(self, now: float) -> list[Effect]:
        """Ends what has passed its deadline, wherever it stands, and releases what lives by a lease that is over."""
        logs: list[TokenLog] = []
        for due in self._deadlines.take_due(now):
            attempt = self.attempts.get(due.attempt_id)
            if attempt is not None and due.waiting:
                logs += self._end_waiting(attempt, now)
            elif attempt is not None:
                logs += self._stop(attempt, FinishReason.DEADLINE, now)
        effects = self._effects(logs)
        for owner, attempt_ids in self.leases.take_expired(now):
            effects += [LeaseEnded(owner, attempt_ids), *self.release(attempt_ids, now)]
        return effects

    def plan(self) -> Plan:
        """The next step; all before must have been applied."""
        assert not self._steps
        plan = self.batch.plan()
        self._steps.append(plan)
        return plan

    def plan_ahead(self) -> Plan | None:
        """The step after the one in flight, where it can be told already; it may hold slices of who ends before it."""
        assert len(self._steps) == 1
        plan = self.batch.plan_ahead()
        if plan is not None:
            self._steps.append(plan)
        return plan

    def extend(self, plan: Plan) -> None:
        """Lets those who came since into a step that was planned ahead and hasn't begun."""
        assert plan is self._steps[-1]
        self.batch.extend(plan)

    def apply(self, plan: Plan, answers: AnySequence[Answer], now: float) -> list[Effect]:
        """Takes in a step's answers: appends tokens, judges every end, frees blocks."""
        first = self._steps.popleft()
        assert plan is first
        self.stepped_at = now
        logs = self._end_leaving(now)
        self.batch.advance(plan)
        if plan.scores:
            plan.score(answers)
        rest = self._append(answers, logs, now)
        plan.drawn = len(answers) - len(rest)
        for answer in rest:
            if isinstance(answer, Speculated):
                self._append_speculated(plan, answer, now)
            elif not isinstance(answer, PromptLogprobs):
                self._fail(answer, logs, now)
        if len(answers) - len(rest) < plan.samples:
            for failed in plan.unanswered(answers):
                self._fail(failed, logs, now)
        return self._effects(logs)

    def check_idle(self) -> None:
        """Raises AssertionError unless nothing is held by a core without open sequences. Takes microseconds."""
        assert not self._open
        load = self.load()
        assert (load.waiting_sequences, load.running_sequences) == (0, 0)
        assert load.free_blocks + load.cached_blocks == load.total_blocks

    def check_integrity(self) -> None:
        """Raises AssertionError when any account is wrong; walks everything that is held."""
        self.batch.check_integrity(sequence for sequence, _ in self._leaving.values())
        self.known.check_integrity()
        self._ownership.check_integrity(self.attempts.values())
        if not self._open:
            self.check_idle()

    # Accepting

    def _accept(self, attempt: Attempt, now: float) -> list[Effect]:
        self.known.add(attempt)
        self._ownership.add(attempt, now)
        self._open += len(attempt.sequences)
        if attempt.deadline is not None:
            self._deadlines.add(attempt.deadline, attempt.submission.attempt_id)
        if not attempt.submission.continues:
            self._deadlines.add(now + self.limits.queue_timeout_s, attempt.submission.attempt_id, waiting=True)
        for sequence in attempt.sequences:
            self.batch.enqueue(sequence)
            self._judge_output_so_far(sequence, now)
        logs = [sequence.log for sequence in attempt.sequences]
        return [Opened(attempt.submission.route, logs), *self._effects([])]

    def _judge_output_so_far(self, sequence: Sequence, now: float) -> None:
        """A continuation may have all its output already: its scheduler died before the end was told."""
        end = natural_end(sequence) if sequence.log.ids else None
        if end is not None:
            self.batch.withdraw(sequence)
            self._end(sequence, end, now)

    # Stepping

    def _append(self, answers: AnySequence[Answer], logs: list[TokenLog], now: float) -> list[Answer]:
        """Appends the sampled tokens, in one pass without a call per token; returns the answers that are no token.

        This is the scheduler's hot loop: once per sequence and step.
        """
        rest: list[Answer] = []
        decoding, vocab_size = self.batch.decoding, self.info.vocab_size
        for answer in answers:
            sequence = decoding.get(answer.key)
            if sequence is None or not isinstance(answer, Sampled) or not 0 <= answer.token_id < vocab_size:
                rest.append(answer)
                continue
            token_id, log = answer.token_id, sequence.log
            if log.logprobs is not None:
                log.logprobs.append(answer.logprobs or NO_LOGPROBS)
            log.ids.append(token_id)
            logs.append(log)
            if (len(log.ids) >= sequence.limit or token_id in sequence.stop_ids) and (end := natural_end(sequence)):
                self._finish(sequence, end, now)
        return rest

    def _append_speculated(self, plan: Plan, answer: Speculated, now: float) -> None:
        """Appends what a draft brought, up to an end; the next step may have been planned without knowing of it."""
        plan.drafted += answer.drafted
        sequence = self.batch.decoding.get(answer.key)
        if sequence is None:
            return
        for sampled in answer.tokens:  # whose log the step has noted already, for the slice's own token
            if self._append((sampled,), [], now):
                self._fail(sampled, [], now)
                break
            sequence.planned += 1
            sequence.planned_output += 1
            plan.drawn += 1
            plan.accepted += 1

    def _fail(self, answer: Sampled | Failed, logs: list[TokenLog], now: float) -> None:
        """Ends a sequence whose answer was no token, and no other. One that left meanwhile needs no answer."""
        sequence = self.batch.decoding.get(answer.key) or self.batch.prefilling.get(answer.key)
        if sequence is not None:
            self._finish(sequence, failure_end(sequence, answer), now, sound=False)
            logs.append(sequence.log)

    # Ending

    def _stop(self, attempt: Attempt, reason: FinishReason, now: float) -> list[TokenLog]:
        """Ends an attempt's open sequences; returns the logs of those that ended now, not those of the running step."""
        ended: list[TokenLog] = []
        for sequence in attempt.sequences:
            if sequence.phase is SequencePhase.ENDED or sequence.log.key in self._leaving:
                continue
            if sequence.phase is not SequencePhase.WAITING and self._steps:
                self.batch.withdraw(sequence)
                self._leaving[sequence.log.key] = sequence, reason
                continue
            self._finish(sequence, cut_short(sequence, reason), now)
            ended.append(sequence.log)
        return ended

    def _end_waiting(self, attempt: Attempt, now: float) -> list[TokenLog]:
        """Ends those of an attempt that never had a place; what was preempted has shown a token and goes on."""
        queued = [s for s in attempt.sequences if s.phase is SequencePhase.WAITING and not s.preemptions]
        for sequence in queued:
            self._finish(sequence, gave_up_waiting(sequence, now - attempt.arrived_at), now)
        return [sequence.log for sequence in queued]

    def _end_leaving(self, now: float) -> list[TokenLog]:
        """Ends those that were stopped during the step that is over; what it and the next one draw is dropped."""
        leaving, self._leaving = self._leaving, {}
        for sequence, reason in leaving.values():
            self.batch.vacate(sequence)
            self._end(sequence, cut_short(sequence, reason), now)
        return [sequence.log for sequence, _ in leaving.values()]

    def _finish(self, sequence: Sequence, end: End, now: float, *, sound: bool = True) -> None:
        held = sequence.phase is not SequencePhase.WAITING
        self.batch.withdraw(sequence)
        if held:
            self.batch.vacate(sequence, sound=sound)
        self._end(sequence, end, now)

    def _end(self, sequence: Sequence, end: End, now: float) -> None:
        """The one door for every end."""
        sequence.move(SequenceEvent.END)
        sequence.changed_at = now
        sequence.log.end = end
        self._open -= 1
        self._rate.add(1, now)
        self._ended.append(sequence)
        attempt = sequence.attempt
        attempt.open_sequences -= 1
        if not attempt.open_sequences:
            attempt.move(AttemptEvent.ALL_ENDED)

    def _effects(self, logs: list[TokenLog]) -> list[Effect]:
        effects: list[Effect] = [Progressed(logs)] if logs else []
        if self._ended:
            effects.append(Ended(self._ended))
            self._ended = []
        return effects

    # Releasing

    def _forget(self, attempt: Attempt, now: float) -> Released:
        self._stop(attempt, FinishReason.ABORTED, now)
        self.known.release(attempt, now)
        self._ownership.remove(attempt)
        logs = [sequence.log for sequence in attempt.sequences]
        return Released(attempt.submission.attempt_id, attempt.owner, logs, attempt)
