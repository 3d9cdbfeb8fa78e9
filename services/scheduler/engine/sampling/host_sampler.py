"""The sampler of an engine that computes on the CPU without PyTorch: one row after the other, in numpy.

So a row's answer never depends on what is beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

import numpy as np

from kernels.sampling.host import draw_row, row_key
from services.scheduler.engine.api import (
    Failed,
    FailureKind,
    Guide,
    GuideLost,
    Logprobs,
    Sampled,
    SamplingSpec,
    SequenceKey,
    Slice,
)
from services.scheduler.engine.sampling.host_logprobs import logprobs_of, told
from services.scheduler.engine.sampling.rules import (
    GREEDY_BELOW,
    NOT_FINITE,
    NOTHING_LEFT,
    check_bias,
    is_penalised,
)
from services.scheduler.engine.sampling.token_counts import FloatArray, IdArray, TokenCounts


@dataclass(slots=True)
class _Sequence:
    """`counts` is None without penalties, `suppressible` empty without such ids. `lost`: why its guide is."""

    spec: SamplingSpec
    counts: TokenCounts | None
    guide: Guide | None
    suppressible: IdArray
    lost: str = ""

    @property
    def greedy(self) -> bool:
        return self.spec.temperature < GREEDY_BELOW

    def changes(self, s: Slice) -> bool:
        """Whether this slice's logits aren't taken as they are."""
        always = self.counts is not None or self.guide is not None or bool(self.spec.logit_bias)
        return always or (s.suppress and len(self.suppressible) > 0)


class HostSampler:
    """What it keeps per sequence are the options and, for penalties, token counts."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._sequences: dict[SequenceKey, _Sequence] = {}

    def open(self, key: SequenceKey, spec: SamplingSpec, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> None:
        """Takes up a sequence; raises ValueError for a bias on an id out of the vocabulary."""
        check_bias(spec, self._vocab_size)
        counted = prompt_ids if spec.repetition_penalty != 1 else ()
        self._sequences[key] = _Sequence(
            spec,
            TokenCounts(counted, output_ids) if is_penalised(spec) else None,
            spec.constraint.start(output_ids) if spec.constraint is not None else None,
            np.array([token for token in spec.suppressible_ids if 0 <= token < self._vocab_size], dtype=np.int64),
        )

    def close(self, key: SequenceKey) -> None:
        """Forgets a sequence."""
        del self._sequences[key]

    def takes_best(self, s: Slice) -> bool:
        """Whether the first largest logit is all that this slice asks for: `best` then answers it, without the row."""
        sequence = self._sequences[s.key]
        return sequence.greedy and sequence.spec.logprobs is None and not sequence.changes(s)

    def best(self, s: Slice, token: int, logit: float) -> Sampled | Failed:
        """The answer of a slice that takes its best: `token` with `logit`, which is NaN when any in the row is."""
        return Sampled(s.key, token) if isfinite(logit) else Failed(s.key, FailureKind.BAD_OUTPUT, NOT_FINITE)

    def sample(self, s: Slice, logits: FloatArray) -> Sampled | Failed:
        """Draws one id from logits (vocab_size,), which it changes.

        Fails where they hold NaN, +inf or nothing finite, and where the options leave no candidate.
        """
        sequence = self._sequences[s.key]
        if not isfinite(logits.max()):
            return Failed(s.key, FailureKind.BAD_OUTPUT, NOT_FINITE)
        raw = logprobs_of(logits) if sequence.spec.logprobs is not None else None
        if sequence.changes(s):
            _adjust(logits, sequence, s.suppress)
            if not isfinite(logits.max()):
                return Failed(s.key, FailureKind.BAD_OUTPUT, sequence.lost or NOTHING_LEFT)
        token = int(logits.argmax()) if sequence.greedy else _draw(logits, sequence.spec, s.output_position)
        details = told(raw, token, sequence.spec.logprobs or 0) if raw is not None else None
        return _answer(s.key, sequence, token, details)


def _draw(logits: FloatArray, spec: SamplingSpec, position: int) -> int:
    key = row_key(spec.seed, spec.choice, position)
    return draw_row(logits, key, temperature=spec.temperature, top_k=spec.top_k, top_p=spec.top_p, min_p=spec.min_p)


def _answer(key: SequenceKey, sequence: _Sequence, token: int, logprobs: Logprobs | None) -> Sampled | Failed:
    if sequence.counts is not None:
        sequence.counts.add(token)
    if sequence.guide is not None:
        try:
            sequence.guide.accept(token)
        except GuideLost as lost:
            return Failed(key, FailureKind.BAD_OUTPUT, str(lost))
    return Sampled(key, token, logprobs)


def _adjust(logits: FloatArray, sequence: _Sequence, suppress: bool) -> None:
    """In the order of `adjustment.py`."""
    spec = sequence.spec
    if sequence.counts is not None:
        _penalise(logits, spec, sequence.counts)
    for token, value in spec.logit_bias:
        logits[token] += np.float32(value)
    if sequence.guide is not None:
        logits[~_allowed(sequence, sequence.guide, suppress, len(logits))] = -np.inf
    elif suppress:
        logits[sequence.suppressible] = -np.inf


def _penalise(logits: FloatArray, spec: SamplingSpec, counts: TokenCounts) -> None:
    ids, times = counts.arrays()
    repetition = np.float32(spec.repetition_penalty)
    values = logits[ids]
    values = np.where(values > 0, values / repetition, values * repetition)
    values -= np.float32(spec.frequency_penalty) * times
    logits[ids] = values - np.float32(spec.presence_penalty) * (times > 0)


def _allowed(sequence: _Sequence, guide: Guide, suppress: bool, vocab_size: int) -> np.ndarray:
    """What the constraint allows, without the suppressed ids unless nothing else is left; (vocab_size,) bool."""
    try:
        mask = np.frombuffer(guide.allowed(), dtype=np.uint8)
    except GuideLost as lost:
        sequence.lost = str(lost)
        return np.zeros(vocab_size, dtype=np.bool_)
    allowed = np.unpackbits(mask, count=vocab_size, bitorder="little").view(np.bool_)
    if suppress and len(sequence.suppressible):
        rest = allowed.copy()
        rest[sequence.suppressible] = False
        allowed = rest if rest.any() else allowed
    return allowed
