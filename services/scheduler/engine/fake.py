"""A deterministic engine without a model: for tests, for measuring everything around a model, for trying the system.

It ships, needs no torch, and costs under a microsecond a token. The token at an output position is a pure function of
(prompt, seed, choice, position), so a continuation on another engine goes on exactly where the first one stopped.

To be that cheap a sequence draws from a palette of 64 ids of its own, whose answers are built when it is opened: making
one answer costs more than all the rest of a step.
"""

from __future__ import annotations

import struct
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from services.scheduler.engine.api import (
    Answer,
    EngineInfo,
    Failed,
    FailureKind,
    Guide,
    Logprobs,
    PromptLogprobs,
    Sampled,
    SamplingSpec,
    SequenceKey,
    Slice,
    Speculated,
)

_PALETTE = 64
_NEVER = float("inf")

_Stream = tuple[int, list[Sampled], float]
"""Salt, palette, and the output position up to which the palette's answers can be given as they are."""

EosAfter = Callable[[Sequence[int], SamplingSpec], int | None]
"""From which output position on a sequence with this prompt gives end-of-text; None for never."""


class FakeMode(Enum):
    """What the output consists of."""

    HASH = "hash"  # ids that look random
    ECHO = "echo"  # the prompt, again and again: position i gives prompt[i % len(prompt)]


@dataclass(frozen=True, kw_only=True)
class FakeConfig:
    """What the fake engine pretends to be.

    Ids of mode HASH lie in [`first_id`, `end_id`), by default up to the vocabulary's end. With `pace_ms` a step ends on
    the wall clock's grid, at the next multiple of `pace_ms` since 1970, so that a client can take the latency of a
    delta as its arrival modulo the pace.
    With `draft_tokens` a decode brings up to so many tokens more, as if they had been guessed; a hash says how many.
    `prefill_us_per_token` is spent on each id of a slice but for a lone one (a decode). A prompt that contains
    `bad_output_id` fails as if its logits were NaN; one that contains `step_error_id` makes the whole step raise.
    """

    model_id: str = "fake"
    vocab_size: int = 49152
    context_length: int = 8192
    block_size: int = 16
    total_blocks: int = 4096
    eos_token_ids: tuple[int, ...] = (2,)
    mode: FakeMode = FakeMode.HASH
    first_id: int = 17
    end_id: int | None = None
    pace_ms: float = 0.0
    prefill_us_per_token: float = 0.0
    draft_tokens: int = 0
    bad_output_id: int | None = None
    step_error_id: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.first_id < (self.end_id or self.vocab_size) <= self.vocab_size:
            raise ValueError(f"ids [{self.first_id}, {self.end_id}) must be a range within [0, {self.vocab_size})")
        if self.pace_ms < 0 or self.prefill_us_per_token < 0 or self.draft_tokens < 0:
            raise ValueError("pace_ms, prefill_us_per_token and draft_tokens can't be negative")


@dataclass(slots=True)
class _Sequence:
    prompt: tuple[int, ...]
    spec: SamplingSpec
    guide: Guide | None
    eos_from: float
    fails: bool
    breaks_step: bool


@dataclass
class FakeEngine:
    """An Engine whose tokens come from a hash or from the prompt; see FakeConfig for what it can pretend."""

    config: FakeConfig = field(default_factory=FakeConfig)
    eos_after: EosAfter | None = None

    def __post_init__(self) -> None:
        config = self.config
        self._sequences: dict[SequenceKey, _Sequence] = {}
        self._streams: dict[SequenceKey, _Stream] = {}
        self._info = EngineInfo(
            model_id=config.model_id,
            vocab_size=config.vocab_size,
            context_length=config.context_length,
            block_size=config.block_size,
            total_blocks=config.total_blocks,
            eos_token_ids=config.eos_token_ids,
            draft_tokens=config.draft_tokens,
        )

    @property
    def info(self) -> EngineInfo:
        """What this engine pretends to be able to do."""
        return self._info

    def open(self, key: SequenceKey, spec: SamplingSpec, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> None:
        """Takes up a sequence; `output_ids` are for its constraint: what else comes depends on the position alone."""
        prompt = tuple(prompt_ids)
        eos_from = self.eos_after(prompt, spec) if self.eos_after else None
        sequence = _Sequence(
            prompt=prompt,
            spec=spec,
            guide=spec.constraint.start(output_ids) if spec.constraint is not None else None,
            eos_from=_NEVER if eos_from is None else eos_from,
            fails=self.config.bad_output_id in prompt,
            breaks_step=self.config.step_error_id in prompt,
        )
        self._sequences[key] = sequence
        self._streams[key] = self._stream(key, sequence)

    def step(self, slices: Sequence[Slice]) -> list[Answer]:
        """Answers for every slice that samples, at the end of the simulated time."""
        if self.config.prefill_us_per_token:
            prefilled = sum(len(s.token_ids) for s in slices if len(s.token_ids) > 1)
            time.sleep(prefilled * self.config.prefill_us_per_token / 1e6)
        if self.config.step_error_id is not None and any(self._sequences[s.key].breaks_step for s in slices):
            raise RuntimeError(f"injected failure: a prompt contains {self.config.step_error_id}")
        answers = self._answer(slices)
        if self.config.draft_tokens:
            answers += [self._speculate(s) for s in slices if s.draft_room(self.config.block_size)]
        answers += self._scores(slices)
        if self.config.pace_ms:
            _sleep_to_grid(self.config.pace_ms / 1e3)
        return answers

    def close(self, key: SequenceKey) -> None:
        """Forgets a sequence."""
        del self._sequences[key], self._streams[key]

    def _stream(self, key: SequenceKey, sequence: _Sequence) -> _Stream:
        plain = sequence.spec.logprobs is None and sequence.guide is None and not sequence.fails
        salt, prompt = _salt(sequence.prompt, sequence.spec), sequence.prompt
        if self.config.mode is FakeMode.ECHO:
            return salt, [Sampled(key, token) for token in prompt], sequence.eos_from if plain else 0
        first, end = self.config.first_id, self.config.end_id or self.config.vocab_size
        ids = (first + _hashed(salt, rank) % (end - first) for rank in range(_PALETTE))
        return salt, [Sampled(key, token) for token in ids], sequence.eos_from if plain else 0

    def _answer(self, slices: Sequence[Slice]) -> list[Answer]:
        # Runs per token: the hash stands here in full, since a call would double the cost.
        streams, rare, echo = self._streams, self._rare, self.config.mode is FakeMode.ECHO
        answers: list[Answer] = []
        for s in slices:
            if s.samples:
                salt, palette, plain_until = streams[s.key]
                position = s.output_position
                if echo:
                    answer = palette[position % len(palette)]
                else:
                    answer = palette[((salt ^ position * 0x9E3779B1) * 0x85EBCA6B & 0xFFFFFFFF) >> 26]
                answers.append(answer if position < plain_until and not s.suppress else rare(s, answer.token_id))
        return answers

    def _speculate(self, s: Slice) -> Answer:
        """What the steps after this one would give, for as many as the hash says; up to a failure."""
        drafted = min(self.config.draft_tokens, s.draft_room(self.config.block_size))
        tokens: list[Sampled] = []
        for place in range(1, 1 + _hashed(self._streams[s.key][0], ~s.output_position) % (drafted + 1)):
            [answer] = self._answer([replace(s, output_position=s.output_position + place)])
            if not isinstance(answer, Sampled):
                break
            tokens.append(answer)
        return Speculated(s.key, drafted, tokens)

    def _scores(self, slices: Sequence[Slice]) -> list[Answer]:
        """Made-up logprobs of prompt ids, as made up as those of drawn ones."""
        vocab_size = self.config.vocab_size
        return [
            PromptLogprobs(s.key, s.start + 1, [_logprobs(token, s.scored_top, vocab_size) for token in s.scored_ids])
            for s in slices
            if s.scored_ids
        ]

    def _rare(self, s: Slice, token: int) -> Sampled | Failed:
        """Injected failures, constraints, end-of-text, suppressed ids, logprobs."""
        sequence = self._sequences[s.key]
        if sequence.fails:
            return Failed(s.key, FailureKind.BAD_OUTPUT, "the logits aren't numbers (injected)")
        if sequence.guide is not None:
            token = self._guided(s, sequence.guide, sequence.spec.suppressible_ids if s.suppress else (), token)
        elif s.output_position >= sequence.eos_from and self.config.eos_token_ids:
            end = self.config.eos_token_ids[0]
            token = token if s.suppress and end in sequence.spec.suppressible_ids else end
        if s.suppress and sequence.guide is None and token in sequence.spec.suppressible_ids:
            allowed = set(range(self.config.vocab_size)).difference(sequence.spec.suppressible_ids)
            if not allowed:
                return Failed(s.key, FailureKind.BAD_OUTPUT, "every id is suppressed")
            token = min(allowed, key=lambda candidate: (candidate - token) % self.config.vocab_size)
        if sequence.spec.logprobs is None:
            return Sampled(s.key, token)
        return Sampled(s.key, token, _logprobs(token, sequence.spec.logprobs, self.config.vocab_size))

    def _guided(self, s: Slice, guide: Guide, suppressed: Sequence[int], wish: int) -> int:
        """Ends as soon as it may; until then takes the first allowed id from the one it would have given otherwise."""
        mask = enumerate(guide.allowed())
        allowed = [8 * place + bit for place, byte in mask if byte for bit in range(8) if byte >> bit & 1]
        allowed = [token for token in allowed if token not in suppressed] or allowed
        ends = [token for token in allowed if token in self.config.eos_token_ids]
        token = ends[0] if ends else min(allowed, key=lambda token: (token - wish) % self.config.vocab_size)
        guide.accept(token)
        return token


def _salt(prompt: tuple[int, ...], spec: SamplingSpec) -> int:
    """32 bits of (prompt, seed, choice)."""
    packed = struct.pack(f"<{len(prompt) + 2}Q", *prompt, spec.seed & 0xFFFFFFFFFFFFFFFF, spec.choice)
    return zlib.crc32(packed)


def _hashed(salt: int, number: int) -> int:
    """32 bits of (salt, number), other ones than the walk over the palette uses."""
    mixed = (salt + number * 0x9E3779B1) * 0x85EBCA6B & 0xFFFFFFFF
    return (mixed ^ mixed >> 15) * 0xC2B2AE35 & 0xFFFFFFFF


def _logprobs(token: int, alternatives: int, vocab_size: int) -> Logprobs:
    """A made-up distribution: each alternative is half as likely as the one before, the drawn token first."""
    ids = tuple((token + rank) % vocab_size for rank in range(alternatives))
    return Logprobs(-0.5, ids, tuple(-0.5 - rank for rank in range(alternatives)))


def _sleep_to_grid(pace_s: float) -> None:
    now = time.time()
    time.sleep(pace_s - now % pace_s)
