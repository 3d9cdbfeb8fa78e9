"""The sampler of a GPU: all of a batch's rows in a few launches, and one wait, for the ids.

It answers what `Sampler` answers, by kernels that draw with the same random numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kernels.sampling.on_device import add_bias, best_of, draw_on_device, penalise
from kernels.sampling.options import Best, Bias, DrawOptions, Penalties
from kernels.sampling.randomness import keys
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
from services.scheduler.engine.sampling.count_table import CountTable
from services.scheduler.engine.sampling.rules import (
    LOGPROB_FLOOR,
    NOT_FINITE,
    NOTHING_LEFT,
    check_bias,
    is_penalised,
)

Tensor = torch.Tensor


@dataclass(slots=True)
class _Sequence:
    """`slot` is its row of counts, -1 without penalties; `lost` says why its guide gave up, "" while it didn't."""

    spec: SamplingSpec
    slot: int
    guide: Guide | None
    lost: str = ""

    @property
    def truncates(self) -> bool:
        return self.spec.top_k > 0 or self.spec.top_p < 1 or self.spec.min_p > 0


@dataclass(frozen=True, slots=True)
class _Row:
    """One row of a step: the slice it answers, its sequence, and the ids that it must not give."""

    slice: Slice
    sequence: _Sequence
    mask: bytes | None
    forbidden: Sequence[int]


class DeviceSampler:
    """Draws for whole batches on its device; the host keeps the options and hands them over in two copies a step."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._table = CountTable(vocab_size, device)
        self._no_masks = torch.zeros(1, -(-vocab_size // 32), dtype=torch.int32, device=device)
        self._sequences: dict[SequenceKey, _Sequence] = {}

    def open(self, key: SequenceKey, spec: SamplingSpec, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> None:
        """Takes up a sequence; raises ValueError for a bias on an id out of the vocabulary."""
        check_bias(spec, self._vocab_size)
        guide = spec.constraint.start(output_ids) if spec.constraint is not None else None
        counted = prompt_ids if spec.repetition_penalty != 1 else ()
        slot = self._table.take(counted, output_ids) if is_penalised(spec) else -1
        self._sequences[key] = _Sequence(spec, slot, guide)

    def close(self, key: SequenceKey) -> None:
        """Forgets a sequence."""
        slot = self._sequences.pop(key).slot
        if slot >= 0:
            self._table.give_back(slot)

    def sample(self, logits: Tensor, slices: Sequence[Slice]) -> list[Sampled | Failed]:
        """Draws one id per row of logits (slices, vocab_size), fp32, which it changes; answers in the slices' order.

        A row that holds NaN, +inf or nothing finite fails alone, and so does one that is left without a candidate.
        """
        if not slices:
            return []
        rows = [self._row(s, self._sequences[s.key]) for s in slices]
        raw = best_of(logits)
        asked = [place for place, row in enumerate(rows) if row.sequence.spec.logprobs is not None]
        logprobs = self._logprobs(logits, raw, asked)
        best = best_of(logits) if self._adjust(logits, rows) else raw
        tokens = self._draw(logits, best, rows)
        wanted = [min(rows[place].sequence.spec.logprobs or 0, self._vocab_size) for place in asked]
        ids, sound, possible, *told = _on_the_host(
            tokens,
            raw.logits.isfinite(),
            best.logits.isfinite(),
            *(self._told(logprobs, tokens, asked, max(wanted)) if logprobs is not None else ()),
        )
        details = dict(zip(asked, _details(wanted, told), strict=True))
        return [
            self._answer(row, int(ids[place]), details.get(place), bool(sound[place]), bool(possible[place]))
            for place, row in enumerate(rows)
        ]

    def _row(self, s: Slice, sequence: _Sequence) -> _Row:
        forbidden = [t for t in sequence.spec.suppressible_ids if 0 <= t < self._vocab_size] if s.suppress else []
        if sequence.guide is None:
            return _Row(s, sequence, None, forbidden)
        try:
            mask = sequence.guide.allowed()
        except GuideLost as lost:
            sequence.lost = str(lost)
            return _Row(s, sequence, bytes(-(-self._vocab_size // 8)), ())
        return _Row(s, sequence, mask, forbidden if _leaves_any(mask, forbidden, self._vocab_size) else ())

    def _adjust(self, logits: Tensor, rows: Sequence[_Row]) -> bool:
        """Penalties, bias, constraint and suppression in place; False when no row asks for any."""
        changed = [place for place, row in enumerate(rows) if row.sequence.slot >= 0 or row.mask is not None]
        if changed:
            penalise(logits, self._penalties(changed, rows))
        entries = [(place, *entry) for place, row in enumerate(rows) for entry in _entries(row)]
        if entries:
            places, ids, values = zip(*entries, strict=True)
            at, tokens = self._int32([places, ids])
            add_bias(logits, Bias(at, tokens, self._fp32([values])[0]))
        return bool(changed or entries)

    def _penalties(self, changed: Sequence[int], rows: Sequence[_Row]) -> Penalties:
        chosen = [rows[place] for place in changed]
        masks = [row.mask for row in chosen if row.mask is not None]
        numbers = iter(range(len(masks)))
        mask_rows = [next(numbers) if row.mask is not None else -1 for row in chosen]
        specs = [row.sequence.spec for row in chosen]
        at, count_rows, mask_at = self._int32([changed, [row.sequence.slot for row in chosen], mask_rows])
        repetition, frequency, presence = self._fp32(
            [
                [spec.repetition_penalty for spec in specs],
                [spec.frequency_penalty for spec in specs],
                [spec.presence_penalty for spec in specs],
            ]
        )
        return Penalties(
            rows=at,
            counts=self._table.counts,
            count_rows=count_rows,
            repetition=repetition,
            frequency=frequency,
            presence=presence,
            masks=self._masks(masks) if masks else self._no_masks,
            mask_rows=mask_at,
        )

    def _masks(self, masks: Sequence[bytes]) -> Tensor:
        words = self._no_masks.shape[1]
        padded = b"".join(bytes(mask)[: 4 * words].ljust(4 * words, b"\0") for mask in masks)
        return torch.from_numpy(np.frombuffer(padded, dtype="<i4").copy()).view(-1, words).to(self._device)

    def _draw(self, logits: Tensor, best: Best, rows: Sequence[_Row]) -> Tensor:
        specs = [row.sequence.spec for row in rows]
        words = keys(
            [spec.seed for spec in specs],
            [spec.choice for spec in specs],
            [row.slice.output_position for row in rows],
        )
        top_k, count_rows, first, second = self._int32(
            [
                [min(max(spec.top_k, 0), self._vocab_size) for spec in specs],
                [row.sequence.slot for row in rows],
                *(words - (words >> 31 << 32)).T.tolist(),  # 32 bits as an int32 holds them
            ]
        )
        temperature, top_p, min_p = self._fp32(
            [[spec.temperature for spec in specs], [spec.top_p for spec in specs], [spec.min_p for spec in specs]]
        )
        options = DrawOptions(
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            keys=torch.stack((first, second), dim=1),
        )
        truncates = any(row.sequence.truncates for row in rows)
        return draw_on_device(logits, best, options, self._table.counts, count_rows, truncates=truncates)

    def _logprobs(self, logits: Tensor, raw: Best, asked: Sequence[int]) -> Tensor | None:
        """(asked, vocab_size), before anything changes the logits; their copy lives for this step."""
        if not asked:
            return None
        at = torch.tensor(asked).to(self._device, non_blocking=True)
        return (logits[at] - raw.log_totals[at].unsqueeze(1)).clamp_(min=LOGPROB_FLOOR)

    def _told(self, logprobs: Tensor, tokens: Tensor, asked: Sequence[int], most: int) -> tuple[Tensor, Tensor, Tensor]:
        """Of each row that asked: its token's own logprob, the best ids, and theirs."""
        at = torch.tensor(asked).to(self._device, non_blocking=True)
        values, ids = logprobs.topk(most, dim=1)
        return logprobs.gather(1, tokens[at].long().unsqueeze(1)), ids.int(), values

    def _answer(
        self, row: _Row, token: int, logprobs: Logprobs | None, sound: bool, possible: bool
    ) -> Sampled | Failed:
        key, sequence = row.slice.key, row.sequence
        if not sound:
            return Failed(key, FailureKind.BAD_OUTPUT, NOT_FINITE)
        if not possible:
            return Failed(key, FailureKind.BAD_OUTPUT, sequence.lost or NOTHING_LEFT)
        if sequence.guide is not None:
            try:
                sequence.guide.accept(token)
            except GuideLost as lost:
                return Failed(key, FailureKind.BAD_OUTPUT, str(lost))
        return Sampled(key, token, logprobs)

    def _int32(self, columns: Sequence[Sequence[int]]) -> Tensor:
        return self._copied(torch.tensor(columns, dtype=torch.int32))

    def _fp32(self, columns: Sequence[Sequence[float]]) -> Tensor:
        return self._copied(torch.tensor(columns, dtype=torch.float32))

    def _copied(self, columns: Tensor) -> Tensor:
        """Column after column, contiguous, without waiting for the device."""
        if self._device.type == "cuda":
            columns = columns.pin_memory()
        return columns.to(self._device, non_blocking=True)


def _on_the_host(*parts: Tensor) -> list[Tensor]:
    """All of them in one copy, the only one in a step that is waited for; booleans come as int32."""
    narrow = [part.int() if part.dtype == torch.bool else part for part in parts]
    joined = torch.cat([part.contiguous().view(torch.int32).flatten() for part in narrow]).cpu()
    pieces = torch.split(joined, [part.numel() for part in narrow])
    return [piece.view(part.dtype).view(part.shape) for piece, part in zip(pieces, narrow, strict=True)]


def _details(wanted: Sequence[int], told: Sequence[Tensor]) -> list[Logprobs]:
    if not told:
        return []
    own, ids, values = (part.tolist() for part in told)
    return [
        Logprobs(mine, tuple(row_ids[:count]), tuple(row_values[:count]))
        for count, (mine,), row_ids, row_values in zip(wanted, own, ids, values, strict=True)
    ]


def _entries(row: _Row) -> list[tuple[int, float]]:
    forbidden = [(token, float("-inf")) for token in row.forbidden]
    return [*row.sequence.spec.logit_bias, *forbidden]


def _leaves_any(mask: bytes, forbidden: Sequence[int], vocab_size: int) -> bool:
    """Whether the mask allows an id that isn't forbidden."""
    allowed = np.unpackbits(np.frombuffer(mask, dtype=np.uint8), count=vocab_size, bitorder="little")
    allowed[list(forbidden)] = 0
    return bool(allowed.any())
