"""What the scheduler asks of whatever computes tokens: one `step` over slices of sequences, and nothing else.

The scheduler's core decides which sequences run, for how many ids, and in which KV blocks. An engine turns that into
sampled ids. The core imports this file; engines implement it. Nothing here knows torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NewType, Protocol

SequenceKey = NewType("SequenceKey", int)
"""One sequence in one scheduler process; never used twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """What an engine can do; fixed at its start.

    `context_length` and `vocab_size` are in tokens, `total_blocks` counts KV blocks of `block_size` tokens each.
    `step_tokens` is how long a step had better be at most: everybody's next token waits for it, and a shorter one than
    the device can fill wastes time. At most `draft_tokens` ids are guessed behind a decode's own.
    """

    model_id: str
    vocab_size: int
    context_length: int
    block_size: int
    total_blocks: int
    eos_token_ids: tuple[int, ...]
    step_tokens: int = 512
    draft_tokens: int = 0


class Guide(Protocol):
    """How far one sequence is in what its text must be."""

    def allowed(self) -> bytes:
        """Which ids may come next: one bit per id, the lowest bit first; never none. Raises GuideLost."""

    def accept(self, token_id: int) -> None:
        """This one came. Raises GuideLost."""


class GuideLost(Exception):
    """A guide can't tell what may follow: its rules became too complex, or a token came that they don't allow."""


class CompiledConstraint(Protocol):
    """What a sequence's text must be, compiled; shared by all sequences that ask for it."""

    def start(self, output_ids: Sequence[int]) -> Guide:
        """A guide for a sequence that has this output already. Raises GuideLost."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingSpec:
    """How one sequence's tokens are drawn: the contract's SamplingParams with every default filled in.

    `temperature` 0 is greedy; `top_k` 0, `top_p` 1 and `min_p` 0 are off. `suppressible_ids` are those that must not be
    drawn while a slice says `suppress` (end-of-text and stop ids below min_tokens). `logprobs`: None for none at all,
    otherwise the number of alternatives per token. A `constraint` leaves only what it allows; where that is nothing but
    suppressed ids, they may be drawn. Randomness is a function of (seed, choice, position) alone.
    """

    seed: int
    choice: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    suppressible_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    constraint: CompiledConstraint | None = None


@dataclass(slots=True)
class Slice:
    """One sequence's share of a step: compute `token_ids` at positions `start`, `start` + 1, … into its blocks.

    Not frozen: the core keeps two per decoding sequence, one for every other step, and moves each on between its steps,
    for a new frozen one costs 2.3 µs per token. An engine reads a slice during its step, and neither changes nor keeps
    it.

    With `samples` the logits after the last id give one new token. `output_position` is that token's place in the
    output (0 for the first), the position its randomness is keyed by. `scored_ids` are the prompt's ids after each of
    the first of `token_ids`, where their logarithmic probabilities are wanted, with those of `scored_top` alternatives:
    one PromptLogprobs answers them.
    """

    key: SequenceKey
    token_ids: Sequence[int]
    start: int
    block_table: Sequence[int]
    samples: bool
    output_position: int
    suppress: bool
    scored_ids: Sequence[int] = ()
    scored_top: int = 0

    def draft_room(self, block_size: int) -> int:
        """How many ids an engine may guess behind its one id and compute with it; 0 where nothing may be drafted.

        A place is left for the token behind them all: the step that computes it may be planned already, with the same
        blocks. What is suppressed here may not be further on, so nothing is guessed before that is over.
        """
        if not self.samples or self.suppress or self.scored_ids or len(self.token_ids) != 1:
            return 0
        return max(len(self.block_table) * block_size - self.start - 2, 0)


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Natural logarithms at one output position, before temperature and truncation; alternatives best first."""

    logprob: float
    top_ids: tuple[int, ...]
    top_logprobs: tuple[float, ...]


NO_LOGPROBS = Logprobs(-1e30, (), ())
"""Stands in where an engine gave none though they were asked for: a row has one entry per id, whatever happens."""


@dataclass(slots=True)
class Sampled:
    """The token drawn for one sampling slice. Not frozen: engines make one per token, and that costs twice as much."""

    key: SequenceKey
    token_id: int
    logprobs: Logprobs | None = None


@dataclass(frozen=True, slots=True)
class Speculated:
    """What a draft brought: `drafted` ids were guessed and computed behind a decode's own, and `tokens` drawn after
    those that were right. They follow the token of the slice's own answer, which stands before this one, and are those
    that as many more steps would have drawn.
    """

    key: SequenceKey
    drafted: int
    tokens: Sequence[Sampled]


@dataclass(frozen=True, slots=True)
class PromptLogprobs:
    """Of prompt ids, the first of which stands at position `first`."""

    key: SequenceKey
    first: int
    logprobs: Sequence[Logprobs]


class FailureKind(Enum):
    """Why a slice gave no token."""

    BAD_OUTPUT = "bad_output"
    OUT_OF_MEMORY = "out_of_memory"
    INTERNAL = "internal"


@dataclass(frozen=True, slots=True)
class Failed:
    """This sequence can't go on; its neighbours in the step can."""

    key: SequenceKey
    kind: FailureKind
    message: str


Answer = Sampled | Failed | Speculated | PromptLogprobs


class Engine(Protocol):
    """Computes steps. Called from one thread, the engine thread, except `info`, which is fixed."""

    @property
    def info(self) -> EngineInfo: ...

    def open(self, key: SequenceKey, spec: SamplingSpec, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> None:
        """Takes up a sequence; penalties count `output_ids`, its output so far (a continuation or a recompute)."""

    def step(self, slices: Sequence[Slice]) -> list[Answer]:
        """Runs one forward pass over all slices; answers for every slice with `samples`, and for every one that failed.

        Where it drafts (within `draft_room`), Speculated tells what came of it.
        Raises only when the whole step failed and no single sequence can be blamed, and before anything was drawn: what
        counts a sequence's tokens, or follows them, can't go back, and the step may be repeated.
        """

    def close(self, key: SequenceKey) -> None:
        """Forgets a sequence. Its blocks are the caller's to give away."""
