"""Continuous batching: which sequences run in the next step, for how many ids, in which blocks.

Sequences join and leave at every step. Decoding ones go first, one token each; what is left of the step's token budget
goes to prefills, in the order of their ranks, in chunks. When the pool runs dry the last in that order gives its blocks
back and waits, to be computed again with its output so far: nobody who reads its output can tell.

A step may be planned while the one before is in flight. Which ids that one draws isn't known then, nor who ends with
them, but all else is: who decodes, at which positions, in which blocks. The engine runs steps in the order of their
plans, so a block that is given up while a step still writes into it can be given out at once: its next owner comes
after that step. What needs an outcome waits for it: a preemption, and sharing what isn't computed yet.

What the prefix cache knows of a prompt is not computed again. A sequence whose next block is just being computed for
another one (a sibling choice, an equal prompt) is passed over until it is there.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from itertools import islice

from services.scheduler.admission import Limits
from services.scheduler.effects import Load
from services.scheduler.engine.api import Answer, Failed, FailureKind, PromptLogprobs, SamplingSpec, SequenceKey, Slice
from services.scheduler.kv.prefix_cache import Node, PrefixCache
from services.scheduler.sequence import Sequence
from services.scheduler.state import SequenceEvent, SequencePhase
from services.scheduler.waiting import Waiting

LOOK_AHEAD = 64
"""Waiting sequences that a step looks at beyond those that it admits; the rest must wait for their turn."""


@dataclass(frozen=True, slots=True)
class Opening:
    """A sequence that the engine must take up before the step; `stop_ids` and `min_tokens` as in `stops_at`."""

    key: SequenceKey
    spec: SamplingSpec
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    stop_ids: frozenset[int] = frozenset()
    min_tokens: int = 0


@dataclass(slots=True, eq=False)
class Plan:
    """One step: first `closes`, then `opens`, then one forward pass over `slices`. `tokens` counts all slices' ids.

    A decode's slice has no ids: its one id is drawn last by the step before, which may not have run yet. `samples`
    counts the slices that sample, `grown` are those that got a block for it. Once the step was applied, `drawn` counts
    the tokens that came of it, `accepted` those of them which right guesses brought, and `drafted` the guesses.
    """

    closes: list[SequenceKey]
    opens: list[Opening] = field(default_factory=list)
    slices: list[Slice] = field(default_factory=list)
    prefills: list[tuple[Sequence, int]] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    grown: list[Sequence] = field(default_factory=list)
    samples: int = 0
    drawn: int = 0
    drafted: int = 0
    accepted: int = 0
    tokens: int = 0
    scores: bool = False

    def score(self, answers: Iterable[Answer]) -> None:
        """Takes in the logprobs of prompt ids; before the step's tokens, the first of which may end a sequence."""
        prompts = {sequence.log.key: sequence.log.prompt for sequence, _ in self.prefills}
        for answer in answers:
            if isinstance(answer, PromptLogprobs) and (prompt := prompts.get(answer.key)) is not None:
                prompt.add(answer.first, answer.logprobs)

    def unanswered(self, answers: Iterable[Answer]) -> list[Failed]:
        """A failure for each slice that samples and got no answer: nobody must wait for one that never comes."""
        answered = {answer.key for answer in answers if not isinstance(answer, PromptLogprobs)}
        missing = (part.key for part in self.slices if part.samples and part.key not in answered)
        return [Failed(key, FailureKind.INTERNAL, "the engine gave no answer") for key in missing]


class Batch:
    """The waiting and the running sequences, and the blocks they hold."""

    def __init__(self, cache: PrefixCache, limits: Limits, draft_tokens: int) -> None:
        self.cache = cache
        self.block_size = cache.block_size
        self.waiting = Waiting()
        self.prefilling: dict[SequenceKey, Sequence] = {}
        self.decoding: dict[SequenceKey, Sequence] = {}
        self.preemptions = 0
        self._limits = limits
        # A full draft, the token behind it, and as much again: the step before may have brought as many.
        self._ahead = 2 * draft_tokens + 1 if draft_tokens else 0
        self._closes: list[SequenceKey] = []
        self._turn = 0

    @property
    def running(self) -> int:
        """Sequences with a place in the batch."""
        return len(self.prefilling) + len(self.decoding)

    @property
    def has_work(self) -> bool:
        """Whether the engine has anything to do or to be told."""
        return bool(self.decoding or self.prefilling or self.waiting or self._closes)

    @property
    def shortage(self) -> str:
        """What the first one waiting waits for: a place in the BATCH, free BLOCKS, or its TURN in the next step."""
        if self.running >= self._limits.max_running:
            return "BATCH"
        first = next(iter(self.waiting), None)
        if first is not None and not self._fits(first, self._find(first)):
            return "BLOCKS"
        return "TURN"

    def load(self, leaving: int, *, draining: bool) -> Load:
        """Where it stands; `leaving` sequences were withdrawn and not vacated yet."""
        return Load(
            waiting_sequences=len(self.waiting),
            running_sequences=self.running + leaving,
            free_blocks=self.cache.pool.free,
            cached_blocks=self.cache.cached,
            total_blocks=self.cache.pool.total,
            block_size=self.block_size,
            draining=draining,
        )

    def enqueue(self, sequence: Sequence) -> None:
        """A new sequence waits."""
        self.waiting.add(sequence)

    def withdraw(self, sequence: Sequence) -> None:
        """Takes a sequence out of all further steps. Its blocks stay its own until `vacate`."""
        if sequence.phase is SequencePhase.WAITING:
            self.waiting.remove(sequence)
        elif sequence.phase is SequencePhase.PREFILL:
            del self.prefilling[sequence.log.key]
        else:
            del self.decoding[sequence.log.key]

    def vacate(self, sequence: Sequence, *, sound: bool = True) -> None:
        """Frees the blocks of a running sequence that was withdrawn; no step may be using them any more.

        What it computed goes on being known, unless that is not `sound`.
        """
        if not sound:
            self.cache.forget_of(sequence.log.key, sequence.path)
        elif sequence.phase is SequencePhase.DECODE:
            self._share(sequence, sequence.length - 1)
        self.cache.let_go(sequence.path, sequence.clear())
        self._closes.append(sequence.log.key)

    def plan(self) -> Plan:
        """The next step, which may be empty; none is in flight."""
        plan = Plan([])
        self._make_room()
        self._fill(plan, list(self.decoding.values()))
        return plan

    def plan_ahead(self) -> Plan | None:
        """The step after the one in flight; None when there is none, or when that one's outcome must be waited for."""
        coming = [*self.decoding.values(), *(s for s in self.prefilling.values() if s.planned == len(s.pending))]
        decodes = [sequence for sequence in coming if sequence.planned_output < sequence.limit]
        if self.cache.available < sum(sequence.planned >= sequence.room for sequence in decodes):
            return None
        plan = Plan([])
        self._fill(plan, decodes)
        return plan if plan.slices or plan.closes else None

    def extend(self, plan: Plan) -> None:
        """Adds to a plan that hasn't begun to run what can be admitted by now."""
        if self.waiting:
            self._admit_waiting(plan)

    def advance(self, plan: Plan) -> None:
        """Counts the computed chunks of those that are still there; a completed prefill goes on to decode."""
        for sequence, tokens in plan.prefills:
            if sequence.log.key in self.prefilling:
                sequence.computed += tokens
                self._share(sequence, sequence.computed)
                if sequence.computed == len(sequence.pending):
                    sequence.start_decode()
                    self.decoding[sequence.log.key] = self.prefilling.pop(sequence.log.key)
        for sequence in plan.grown:
            if sequence.log.key in self.decoding:
                # All of the blocks that it had before are full now.
                self._share(sequence, sequence.length - 1)

    def check_integrity(self, leaving: Iterable[Sequence]) -> None:
        """Raises AssertionError when the queues or the pool's accounts are wrong."""
        running = [*self.prefilling.values(), *self.decoding.values(), *leaving]
        self.waiting.check_integrity()
        assert all(len(sequence.blocks) * self.block_size == sequence.room for sequence in running)
        self.cache.check_integrity((sequence.path, sequence.blocks) for sequence in running)

    # Decoding

    def _fill(self, plan: Plan, decodes: list[Sequence]) -> None:
        plan.closes, self._closes = self._closes, []
        for sequence in sorted(self._short(decodes), key=lambda s: s.rank):
            sequence.add_blocks(self.cache.take(1), self.block_size)
            plan.grown.append(sequence)
        plan.slices = self._decode(decodes)
        plan.samples = plan.tokens = len(plan.slices)
        for sequence in self.prefilling.values():
            self._add_prefill(plan, sequence)
        self.extend(plan)
        if plan.slices:
            self._turn ^= 1

    def _short(self, decodes: list[Sequence]) -> list[Sequence]:
        """Those that get a block: for the next position, and for drafts while two are left for each.

        So guesses take what hardly anybody is about to need.
        """
        if self.cache.available <= 2 * len(decodes):
            return [s for s in decodes if s.planned >= s.room]
        ahead = self._ahead
        return [s for s in decodes if s.planned + ahead >= s.room and (s.planned >= s.room or s.room < s.most)]

    def _decode(self, sequences: list[Sequence]) -> list[Slice]:
        """Their slices of this turn, each for the position that follows; runs once per sequence and step."""
        turn, slices = self._turn, []
        for sequence in sequences:
            part, position = sequence.decodes[turn], sequence.planned_output
            part.token_ids = ()
            part.start = sequence.planned
            part.block_table = sequence.blocks
            part.output_position = position
            part.suppress = position < sequence.suppressed_output
            sequence.planned += 1
            sequence.planned_output = position + 1
            slices.append(part)
        return slices

    # Blocks

    def _make_room(self) -> None:
        """Sees to it that each decoding sequence can have the block it needs next, in the order of service."""
        given = 0
        for sequence in sorted((s for s in self.decoding.values() if s.planned >= s.room), key=lambda s: s.rank):
            while sequence.phase is SequencePhase.DECODE and self.cache.available == given:
                self._preempt(max([*self.decoding.values(), *self.prefilling.values()], key=lambda s: s.rank))
            given += sequence.phase is SequencePhase.DECODE

    def _preempt(self, sequence: Sequence) -> None:
        self.withdraw(sequence)
        self.vacate(sequence)
        sequence.move(SequenceEvent.PREEMPT)
        sequence.preemptions += 1
        self.preemptions += 1
        self.waiting.add(sequence)

    def _share(self, sequence: Sequence, computed: int) -> None:
        """Lets others use the blocks that its first `computed` positions fill."""
        path, size = sequence.path, self.block_size
        while (number := len(path)) < computed // size and self.cache.may_extend(path):
            ids = sequence.ids(number * size, (number + 1) * size)
            own, salt = sequence.blocks[number], sequence.attempt.submission.tenant
            shared = self.cache.share(path, salt, ids, own, sequence.log.key)
            if shared != own:
                sequence.blocks = [*sequence.blocks[:number], shared, *sequence.blocks[number + 1 :]]

    # Admitting

    def _admit_waiting(self, plan: Plan) -> None:
        """Gives places in the order of service until one doesn't fit; smaller ones must not overtake it for ever."""
        coming = {self._next_shared(sequence, sequence.path) for sequence in self.prefilling.values()}
        passed_over = 0
        for sequence, path in self._candidates():
            if not self._has_place(plan) or passed_over == LOOK_AHEAD:
                return
            if (block := self._next_shared(sequence, path)) is not None and block in coming:
                passed_over += 1
                continue
            if not self._fits(sequence, path):
                return
            self._admit(plan, sequence, path)
            coming.add(block)

    def _candidates(self) -> Iterable[tuple[Sequence, list[Node]]]:
        """Who waits, with what the cache knows of it."""
        if not self._limits.policy.by_prefix:
            # Looked up one by one, for usually the first one doesn't get in.
            return ((sequence, self._find(sequence)) for sequence in self.waiting)
        found = [(sequence, self._find(sequence)) for sequence in islice(self.waiting, LOOK_AHEAD)]
        rank_with_prefix, size = self._limits.policy.rank_with_prefix, self.block_size
        return sorted(found, key=lambda each: rank_with_prefix(each[0].rank, len(each[1]) * size))

    def _find(self, sequence: Sequence) -> list[Node]:
        # The last id is computed in any case: without it there are no logits to draw from.
        # Of a prompt whose logprobs are wanted, everything is computed whose logprob isn't known yet.
        scores = sequence.log.prompt
        known = len(scores.logprobs) if scores is not None and scores.missing else sequence.length - 1
        most = known // self.block_size
        return self.cache.find(sequence.attempt.submission.tenant, sequence.ids(0, most * self.block_size), most)

    def _next_shared(self, sequence: Sequence, path: list[Node]) -> Hashable:
        """What stands for the block behind its path, the same for all who could share it; None where nobody could."""
        start, size = len(path) * self.block_size, self.block_size
        scores = sequence.log.prompt
        if (
            not self.cache.may_extend(path)
            or start + size >= sequence.length
            or (scores is not None and scores.missing)
        ):
            return None
        return path[-1] if path else sequence.attempt.submission.tenant, sequence.ids(start, start + size)

    def _has_place(self, plan: Plan) -> bool:
        return plan.tokens < self._limits.max_step_tokens and self.running < self._limits.max_running

    def _fits(self, sequence: Sequence, path: list[Node]) -> bool:
        """Whether there are blocks for it; one per running sequence is left, so that it isn't the next victim.

        Alone it always fits, once those that left in the middle of a step have given their blocks back.
        """
        needed = self._blocks_for(sequence) - len(path) + self.cache.idle_in(path)
        return self.cache.available >= needed + self.running

    def _blocks_for(self, sequence: Sequence) -> int:
        return -(-sequence.length // self.block_size)

    def _admit(self, plan: Plan, sequence: Sequence, path: list[Node]) -> None:
        self.waiting.remove(sequence)
        self.cache.hold(path)
        own = self.cache.take(self._blocks_for(sequence) - len(path))
        sequence.start_prefill(path, own, self.block_size)
        log = sequence.log
        self.prefilling[log.key] = sequence
        plan.admitted.append(sequence)
        prompt_ids, output_ids = sequence.attempt.submission.prompt_ids, tuple(log.ids)
        plan.opens.append(
            Opening(log.key, sequence.spec, prompt_ids, output_ids, sequence.stop_ids, sequence.min_tokens)
        )
        self._add_prefill(plan, sequence)

    def _add_prefill(self, plan: Plan, sequence: Sequence) -> None:
        tokens = min(len(sequence.pending) - sequence.planned, self._limits.max_step_tokens - plan.tokens)
        if tokens > 0:
            part = sequence.prefill(tokens)
            plan.slices.append(part)
            plan.prefills.append((sequence, tokens))
            plan.samples += part.samples
            plan.tokens += tokens
            plan.scores |= bool(part.scored_ids)
