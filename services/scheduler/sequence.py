"""What the scheduler knows of one sequence, and of the attempt it belongs to."""

from __future__ import annotations

from dataclasses import dataclass, field

from services.scheduler.engine.api import SamplingSpec, Slice
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
    """One sequence: its rules, its log, and what it holds while it runs.

    `limit` is the most output tokens it may have. `stop_ids` end it, except below `min_tokens`. `pending` are the ids
    that prefill computes, of which `computed` are done. `decode` is the one slice it decodes with: a step's slice
    differs from the last one's by a token, and building a new one per token would cost more than the rest of planning.
    `room` is how many positions its blocks hold; `checkpoint` the output length at which something other than one more
    token is due, so that most tokens are judged by two comparisons. `changed_at` is when it came, or ended;
    `admitted_at` and `first_token_at` are the starts of the step that first ran it and of its output, 0 before.
    """

    attempt: Attempt
    log: TokenLog
    spec: SamplingSpec
    limit: int
    min_tokens: int
    stop_ids: frozenset[int]
    phase: SequencePhase = SequencePhase.WAITING
    blocks: list[int] = field(default_factory=list)
    pending: tuple[int, ...] = ()
    computed: int = 0
    room: int = 0
    checkpoint: int = 0
    preemptions: int = 0
    changed_at: float = 0.0
    admitted_at: float = 0.0
    first_token_at: float = 0.0
    decode: Slice = field(init=False)

    def __post_init__(self) -> None:
        self.decode = Slice(self.log.key, (), 0, self.blocks, True, 0, False)

    @property
    def length(self) -> int:
        """Prompt and output, tokens."""
        return len(self.attempt.submission.prompt_ids) + len(self.log.ids)

    @property
    def suppresses(self) -> bool:
        """Whether its next token must not be one that ends it."""
        return bool(self.spec.suppressible_ids) and len(self.log.ids) < self.min_tokens

    def move(self, event: SequenceEvent) -> None:
        """Goes on to the next phase."""
        self.phase = next_sequence_phase(self.phase, event)

    def start_prefill(self, blocks: list[int], block_size: int) -> None:
        """Takes a place in the batch, with blocks for everything there is so far."""
        self.move(SequenceEvent.ADMIT)
        self.add_blocks(blocks, block_size)
        prompt_ids = self.attempt.submission.prompt_ids
        self.pending = (*prompt_ids, *self.log.ids) if self.log.ids else prompt_ids
        self.computed = 0

    def add_blocks(self, blocks: list[int], block_size: int) -> None:
        """Takes more blocks."""
        self.blocks += blocks
        self.room = len(self.blocks) * block_size

    def prefill(self, tokens: int) -> Slice:
        """The slice for its next `tokens` pending ids; the last one of the prefill samples."""
        end = self.computed + tokens
        ids = self.pending[self.computed : end]
        samples = end == len(self.pending)
        return Slice(self.log.key, ids, self.computed, self.blocks, samples, len(self.log.ids), self.suppresses)

    def start_decode(self) -> None:
        """All pending ids are computed: its next token is about to be appended."""
        self.move(SequenceEvent.FIRST_TOKEN)
        self.decode.start = len(self.pending) - 1
        self.decode.output_position = len(self.log.ids)
        self.decode.suppress = self.suppresses
        self.checkpoint = min(self.min_tokens, self.limit) if self.suppresses else self.limit
        self.pending = ()

    def stop_suppressing(self) -> None:
        """It has its minimum: from here on it may end."""
        self.decode.suppress = False
        self.checkpoint = self.limit

    def clear(self) -> list[int]:
        """Gives up everything it holds; returns its blocks."""
        blocks = self.blocks[:]
        # The decode slice holds this very list.
        self.blocks.clear()
        self.pending = ()
        self.computed = self.room = 0
        return blocks
