"""What the scheduler knows of one sequence, and of the attempt it belongs to."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.scheduler.engine.api import SamplingSpec, Slice
from services.scheduler.kv.prefix_cache import Node
from services.scheduler.policy import Rank
from services.scheduler.state import (
    AttemptEvent,
    AttemptPhase,
    SequenceEvent,
    SequencePhase,
    next_attempt_phase,
    next_sequence_phase,
)
from services.scheduler.submission import Route, Submission
from services.scheduler.token_log import TokenLog


@dataclass(slots=True, eq=False)
class Attempt:
    """One accepted attempt and its sequences, one per choice. `deadline` is a moment on the core's clock, seconds.

    `owner` is whose route carries it, `number` its place in that owner's count: at first the submission's, then those
    of whoever claimed it.
    """

    submission: Submission
    arrived_at: float
    deadline: float | None
    phase: AttemptPhase
    sequences: list[Sequence] = field(default_factory=list)
    open_sequences: int = 0
    owner: Route = field(init=False)
    number: int = field(init=False)

    def __post_init__(self) -> None:
        self.owner, self.number = self.submission.route, self.submission.attempt_number

    def move(self, event: AttemptEvent) -> None:
        """Goes on to the next phase."""
        self.phase = next_attempt_phase(self.phase, event)


@dataclass(slots=True, eq=False)
class Sequence:
    """One sequence: its rules, its log, and what it holds while it runs. `rank` is its place in the order of service.

    `limit` is the most output tokens it may have, `most` the most positions that are computed for it. `stop_ids` end
    it, except below `min_tokens`. The leading ones of its `blocks` are shared, as the prefix cache's `path` says;
    `room` is how many positions they hold. Steps in flight read the list of blocks, so another one takes its place
    instead of a change to it. `pending` are the ids that prefill computes, of which `computed` are done. `planned`
    positions and `planned_output` tokens are done, or will be when the steps in flight are. `decodes` are the slices it
    decodes with, one for every other step, of which two may be in flight: a step's slice differs from the last one's by
    a token, and building a new one per token would cost more than the rest of planning. `changed_at` is when it came,
    or ended; `admitted_at` and `first_token_at` are the starts of the step that first ran it and of its output, 0
    before.
    """

    attempt: Attempt
    log: TokenLog
    rank: Rank
    spec: SamplingSpec
    limit: int
    min_tokens: int
    stop_ids: frozenset[int]
    phase: SequencePhase = SequencePhase.WAITING
    blocks: list[int] = field(default_factory=list)
    path: list[Node] = field(default_factory=list)
    pending: tuple[int, ...] = ()
    computed: int = 0
    planned: int = 0
    planned_output: int = 0
    room: int = 0
    preemptions: int = 0
    changed_at: float = 0.0
    admitted_at: float = 0.0
    first_token_at: float = 0.0
    most: int = field(init=False)
    decodes: tuple[Slice, Slice] = field(init=False)
    suppressed_output: int = field(init=False)

    def __post_init__(self) -> None:
        self.most = len(self.attempt.submission.prompt_ids) + self.limit - 1
        self.decodes = self._empty_slice(), self._empty_slice()
        self.suppressed_output = self.min_tokens if self.spec.suppressible_ids else 0

    @property
    def length(self) -> int:
        """Prompt and output, tokens."""
        return len(self.attempt.submission.prompt_ids) + len(self.log.ids)

    def ids(self, start: int, end: int) -> tuple[int, ...]:
        """Prompt and output from position `start` to before `end`."""
        prompt_ids = self.attempt.submission.prompt_ids
        known = len(prompt_ids)
        if end <= known:
            return prompt_ids[start:end]
        return (*prompt_ids[start:known], *self.log.ids[max(start - known, 0) : end - known])

    def move(self, event: SequenceEvent) -> None:
        """Goes on to the next phase."""
        self.phase = next_sequence_phase(self.phase, event)

    def start_prefill(self, path: list[Node], blocks: list[int], block_size: int) -> None:
        """Takes a place in the batch, with blocks for everything there is so far; those of `path` are computed."""
        self.move(SequenceEvent.ADMIT)
        self.path += path
        self.add_blocks([*(node.block for node in path), *blocks], block_size)
        self.pending = self.ids(0, self.length)
        self.computed = self.planned = len(path) * block_size
        self.planned_output = len(self.log.ids)
        if not self.preemptions:
            self.log.cached_prompt_tokens = min(self.computed, len(self.attempt.submission.prompt_ids))

    def add_blocks(self, blocks: list[int], block_size: int) -> None:
        """Takes more blocks."""
        self.blocks = [*self.blocks, *blocks]
        self.room = len(self.blocks) * block_size

    def prefill(self, tokens: int) -> Slice:
        """The slice for its next `tokens` pending ids; the last one of the prefill samples."""
        start, end = self.planned, self.planned + tokens
        samples = end == len(self.pending)
        scored = self._scored(start + 1, end + 1)
        position, top = self.planned_output, self.spec.prompt_logprobs or 0
        suppress = position < self.suppressed_output
        self.planned = end
        self.planned_output += samples
        ids = self.pending[start:end]
        return Slice(self.log.key, ids, start, self.blocks, samples, position, suppress, scored, top)

    def _scored(self, start: int, end: int) -> tuple[int, ...]:
        prompt = self.log.prompt
        return prompt.ids[start:end] if prompt is not None and prompt.missing else ()

    def start_decode(self) -> None:
        """All pending ids are computed: its next token is about to be appended."""
        self.move(SequenceEvent.FIRST_TOKEN)
        self.pending = ()

    def clear(self) -> list[int]:
        """Gives up everything it holds but its path; returns the blocks behind it, which are its own."""
        blocks = self.blocks[len(self.path) :]
        self.blocks = []
        self.pending = ()
        self.computed = self.planned = self.planned_output = self.room = 0
        return blocks

    def _empty_slice(self) -> Slice:
        return Slice(self.log.key, (), 0, self.blocks, True, 0, False)
