"""Continuous batching: which sequences run in the next step, for how many ids, in which blocks.

Sequences join and leave at every step. Decoding ones go first, one token each; what is left of the step's token budget
goes to prefills, first come first served, in chunks. When the pool runs dry the latest arrival gives its blocks back
and waits at the front, to be computed again with its output so far: nobody who reads its output can tell.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from services.scheduler.admission import Limits
from services.scheduler.engine.api import SamplingSpec, SequenceKey, Slice
from services.scheduler.kv.pool import BlockPool
from services.scheduler.sequence import Sequence
from services.scheduler.state import SequenceEvent, SequencePhase


@dataclass(frozen=True, slots=True)
class Opening:
    """A sequence that the engine must take up before the step."""

    key: SequenceKey
    spec: SamplingSpec
    prompt_ids: tuple[int, ...]
    output_ids: tuple[int, ...]


@dataclass(slots=True, eq=False)
class Plan:
    """One step: first `closes`, then `opens`, then one forward pass over `slices`. `tokens` counts all slices' ids."""

    closes: list[SequenceKey]
    opens: list[Opening] = field(default_factory=list)
    slices: list[Slice] = field(default_factory=list)
    prefills: list[tuple[Sequence, int]] = field(default_factory=list)
    admitted: list[Sequence] = field(default_factory=list)
    samples: int = 0
    tokens: int = 0


class Batch:
    """The waiting and the running sequences, and the blocks they hold."""

    def __init__(self, pool: BlockPool, block_size: int, limits: Limits) -> None:
        self.pool = pool
        self.block_size = block_size
        self.waiting: deque[Sequence] = deque()
        self.prefilling: dict[SequenceKey, Sequence] = {}
        self.decoding: dict[SequenceKey, Sequence] = {}
        self.preemptions = 0
        self._limits = limits
        self._closes: list[SequenceKey] = []

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
        if self.waiting and self.running and self.pool.free < self._blocks_for(self.waiting[0]) + self.running:
            return "BLOCKS"
        return "TURN"

    def enqueue(self, sequence: Sequence) -> None:
        """A new sequence waits at the end."""
        self.waiting.append(sequence)

    def withdraw(self, sequence: Sequence) -> None:
        """Takes a sequence out of all further steps. Its blocks stay its own until `vacate`."""
        if sequence.phase is SequencePhase.WAITING:
            self.waiting.remove(sequence)
        elif sequence.phase is SequencePhase.PREFILL:
            del self.prefilling[sequence.log.key]
        else:
            del self.decoding[sequence.log.key]

    def vacate(self, sequence: Sequence) -> None:
        """Frees the blocks of a running sequence that was withdrawn; no step may be using them any more."""
        self.pool.give_back(sequence.clear())
        self._closes.append(sequence.log.key)

    def plan(self) -> Plan:
        """The next step, which may be empty. It must be applied before the next one is planned."""
        self._grow()
        closes, self._closes = self._closes, []
        plan = Plan(closes)
        plan.slices = [sequence.decode for sequence in self.decoding.values()]
        plan.samples = plan.tokens = len(plan.slices)
        for sequence in self.prefilling.values():
            self._add_prefill(plan, sequence)
        while self._may_admit(plan):
            self._add_prefill(plan, self._admit(plan))
        return plan

    def advance(self, plan: Plan) -> None:
        """Counts the computed chunks of those that are still there; a completed prefill goes on to decode."""
        for sequence, tokens in plan.prefills:
            if sequence.log.key in self.prefilling:
                sequence.computed += tokens
                if sequence.computed == len(sequence.pending):
                    sequence.start_decode()
                    self.decoding[sequence.log.key] = self.prefilling.pop(sequence.log.key)

    def check_integrity(self, leaving: Iterable[Sequence]) -> None:
        """Raises AssertionError when the queues or the pool's accounts are wrong."""
        running = [*self.prefilling.values(), *self.decoding.values(), *leaving]
        assert all(not sequence.blocks for sequence in self.waiting)
        assert all(len(sequence.blocks) * self.block_size == sequence.room for sequence in running)
        keys = [sequence.log.key for sequence in self.waiting]
        assert keys == sorted(keys), "the waiting ones are out of order"
        self.pool.check_integrity(sequence.blocks for sequence in running)

    def _grow(self) -> None:
        """Gives each decoding sequence the block it needs next, the earliest arrivals first."""
        short = [s for s in self.decoding.values() if s.decode.start >= s.room]
        for sequence in sorted(short, key=lambda s: s.log.key):
            while sequence.phase is SequencePhase.DECODE and not self.pool.free:
                self._preempt(max([*self.decoding.values(), *self.prefilling.values()], key=lambda s: s.log.key))
            if sequence.phase is SequencePhase.DECODE:
                sequence.add_blocks(self.pool.take(1), self.block_size)

    def _preempt(self, sequence: Sequence) -> None:
        self.withdraw(sequence)
        self.vacate(sequence)
        sequence.move(SequenceEvent.PREEMPT)
        sequence.preemptions += 1
        self.preemptions += 1
        # The latest running one still came before all that wait.
        self.waiting.appendleft(sequence)

    def _may_admit(self, plan: Plan) -> bool:
        """Whether the first one waiting gets in. A block per running one is left, so that it isn't the next victim."""
        if not self.waiting or plan.tokens >= self._limits.max_step_tokens or self.running >= self._limits.max_running:
            return False
        return not self.running or self.pool.free >= self._blocks_for(self.waiting[0]) + self.running

    def _blocks_for(self, sequence: Sequence) -> int:
        return -(-sequence.length // self.block_size)

    def _admit(self, plan: Plan) -> Sequence:
        sequence = self.waiting.popleft()
        sequence.start_prefill(self.pool.take(self._blocks_for(sequence)), self.block_size)
        log = sequence.log
        self.prefilling[log.key] = sequence
        plan.admitted.append(sequence)
        plan.opens.append(Opening(log.key, sequence.spec, sequence.attempt.submission.prompt_ids, tuple(log.ids)))
        return sequence

    def _add_prefill(self, plan: Plan, sequence: Sequence) -> None:
        tokens = min(len(sequence.pending) - sequence.computed, self._limits.max_step_tokens - plan.tokens)
        if tokens > 0:
            part = sequence.prefill(tokens)
            plan.slices.append(part)
            plan.prefills.append((sequence, tokens))
            plan.samples += part.samples
            plan.tokens += tokens
