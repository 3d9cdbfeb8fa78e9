"""Turns a step's logits into answers: one token, or a failure, for each sampling slice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.sampling.randomness import keys
from kernels.sampling.reference import draw_reference
from services.scheduler.engine.api import (
    Failed,
    FailureKind,
    GuideLost,
    Logprobs,
    Sampled,
    SamplingSpec,
    SequenceKey,
    Slice,
)
from services.scheduler.engine.blame import blamed
from services.scheduler.engine.sampling.adjustment import Adjustment, adjust, adjustment
from services.scheduler.engine.sampling.rules import GREEDY_BELOW, LOGPROB_FLOOR, NOT_FINITE, NOTHING_LEFT

Tensor = torch.Tensor


@dataclass(slots=True)
class _Sequence:
    spec: SamplingSpec
    change: Adjustment | None

    @property
    def greedy(self) -> bool:
        return self.spec.temperature < GREEDY_BELOW


class Sampler:
    """Draws for whole batches; what it keeps per sequence are the options and, for penalties, token counts.

    With `row_by_row` a row's sums are taken in the same order whatever is beside it: PyTorch splits those of a lone row
    among its threads, and those of several rows not.
    """

    def __init__(self, vocab_size: int, device: torch.device, *, row_by_row: bool = False) -> None:
        self._row_by_row = row_by_row
        self._vocab_size = vocab_size
        self._device = device
        self._sequences: dict[SequenceKey, _Sequence] = {}

    def open(self, key: SequenceKey, spec: SamplingSpec, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> None:
        """Takes up a sequence; raises ValueError for a bias on an id out of the vocabulary."""
        change = adjustment(spec, prompt_ids, output_ids, self._vocab_size, self._device)
        self._sequences[key] = _Sequence(spec, change)

    def close(self, key: SequenceKey) -> None:
        """Forgets a sequence."""
        del self._sequences[key]

    def sample(self, logits: Tensor, slices: Sequence[Slice]) -> list[Sampled | Failed]:
        """Draws one id per row of logits (slices, vocab_size), fp32, which it changes; answers in the slices' order.

        A row that holds NaN, +inf or nothing finite fails alone, and so does one that bias and suppression left without
        a candidate.
        """
        if not slices:
            return []
        if self._row_by_row and len(slices) > 1:
            return [self._sample_alone(logits[row : row + 1], s) for row, s in enumerate(slices)]
        sequences = [self._sequences[s.key] for s in slices]
        sound = logits.amax(1).isfinite()
        raw = _raw_logprobs(logits, sequences)
        self._adjust(logits, slices, sequences)
        best = logits.amax(1)
        possible = best.isfinite()
        tokens = self._tokens(logits, best, slices, sequences, sound & possible)
        details = _logprobs(raw, tokens, sequences)
        return [
            self._answer(s, sequence, token, details.get(row), is_sound, is_possible)
            for row, (s, sequence, token, is_sound, is_possible) in enumerate(
                zip(slices, sequences, tokens.tolist(), sound.tolist(), possible.tolist(), strict=True)
            )
        ]

    def _sample_alone(self, logits: Tensor, s: Slice) -> Sampled | Failed:
        try:
            return self.sample(logits, [s])[0]
        except Exception as error:  # noqa: BLE001  # the rows before have drawn theirs, and must not once more
            return blamed(s.key, error)

    def _adjust(self, logits: Tensor, slices: Sequence[Slice], sequences: Sequence[_Sequence]) -> None:
        changes = [
            (row, sequence.change, s.suppress)
            for row, (s, sequence) in enumerate(zip(slices, sequences, strict=True))
            if sequence.change is not None and (s.suppress or sequence.change.always)
        ]
        if changes:
            adjust(logits, changes)

    def _tokens(
        self, logits: Tensor, best: Tensor, slices: Sequence[Slice], sequences: Sequence[_Sequence], usable: Tensor
    ) -> Tensor:
        random = [
            row
            for row, (sequence, ok) in enumerate(zip(sequences, usable.tolist(), strict=True))
            if ok and not sequence.greedy
        ]
        if len(random) < len(slices):
            tokens = _best_ids(logits)
        else:
            tokens = torch.empty(len(slices), dtype=torch.int64, device=logits.device)
        if random:
            rows = torch.tensor(random, device=logits.device)
            tokens[rows] = _draw(
                logits[rows], best[rows], [slices[r] for r in random], [sequences[r].spec for r in random]
            )
        return tokens

    def _answer(
        self, s: Slice, sequence: _Sequence, token: int, logprobs: Logprobs | None, sound: bool, possible: bool
    ) -> Sampled | Failed:
        if not sound:
            return Failed(s.key, FailureKind.BAD_OUTPUT, NOT_FINITE)
        change = sequence.change
        if not possible:
            why = change.lost if change is not None else ""
            return Failed(s.key, FailureKind.BAD_OUTPUT, why or NOTHING_LEFT)
        if change is not None and change.counts is not None:
            change.counts.add(token)
        if change is not None and change.guide is not None:
            try:
                change.guide.accept(token)
            except GuideLost as lost:
                return Failed(s.key, FailureKind.BAD_OUTPUT, str(lost))
        return Sampled(s.key, token, logprobs)


def _best_ids(logits: Tensor) -> Tensor:
    """The first best id of each row; on the CPU through numpy, whose argmax is several times faster."""
    if logits.device.type == "cpu":
        return torch.from_numpy(logits.numpy().argmax(axis=1))
    return logits.argmax(dim=1)


def _draw(logits: Tensor, best: Tensor, slices: Sequence[Slice], specs: Sequence[SamplingSpec]) -> Tensor:
    """Temperature, truncation, and the draw itself; `logits` is a copy and becomes the weights."""
    device = logits.device
    options = torch.tensor([(s.temperature, s.top_p, s.min_p) for s in specs], dtype=torch.float32, device=device)
    temperature, top_p, min_p = options.unbind(1)
    top_k = torch.tensor([max(s.top_k, 0) for s in specs], device=device)
    row_keys = keys([s.seed for s in specs], [s.choice for s in specs], [s.output_position for s in slices])
    truncates = any(s.top_p < 1 or s.min_p > 0 or s.top_k > 0 for s in specs)
    return draw_reference(logits, best, temperature, top_k, top_p, min_p, row_keys.to(device), truncates=truncates)


def _raw_logprobs(logits: Tensor, sequences: Sequence[_Sequence]) -> dict[int, Tensor]:
    """Log-probabilities (vocab_size,) of the rows that ask for them, taken before anything changes the logits."""
    rows = [row for row, sequence in enumerate(sequences) if sequence.spec.logprobs is not None]
    if not rows:
        return {}
    taken = logits[torch.tensor(rows, device=logits.device)].log_softmax(1).clamp_(min=LOGPROB_FLOOR)
    return dict(zip(rows, taken, strict=True))


def _logprobs(raw: dict[int, Tensor], tokens: Tensor, sequences: Sequence[_Sequence]) -> dict[int, Logprobs]:
    found = {}
    for row, logprobs in raw.items():
        alternatives = min(sequences[row].spec.logprobs or 0, len(logprobs))
        values, ids = logprobs.topk(alternatives)
        found[row] = Logprobs(logprobs[tokens[row]].item(), tuple(ids.tolist()), tuple(values.tolist()))
    return found
