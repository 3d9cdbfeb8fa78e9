"""The plan of the Triton kernels: block tables, lengths and rows of a step, in one copy to the device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from kernels.paged_attention.plan import Span

Tensor = torch.Tensor

_SPLITS_MAX = 64
_SPLIT_POSITIONS_MIN = 256  # below, a split's own start and its share of the reduction cost more than they spread


@dataclass(frozen=True, slots=True)
class Tables:
    """Sequences of one kind, all int32: `first_rows` (n,) in the step, `lengths` (n,) positions known after it, and
    `blocks` (n, width), padded with block 0, which is never read there."""

    first_rows: Tensor
    lengths: Tensor
    blocks: Tensor


@dataclass(frozen=True, slots=True)
class TablePlan:
    """`slots` (rows,) for the write; decodes, split `splits` ways; prefills with the sums of their rows (n + 1,)."""

    slots: Tensor
    decodes: Tables | None
    splits: int
    prefills: Tables | None
    row_sums: Tensor | None
    prefill_rows: int


def plan_tables(spans: Sequence[Span], block_size: int, device: torch.device) -> TablePlan:
    """Plans for rows laid out span after span; a span of one row is a decode, wherever it stands in its sequence."""
    placed = list(zip(spans, accumulate((span.length for span in spans), initial=0), strict=False))
    decodes = [(span, row) for span, row in placed if span.length == 1]
    prefills = [(span, row) for span, row in placed if span.length > 1]
    sums = list(accumulate((span.length for span, _ in prefills), initial=0))
    slots = [slot for span in spans for slot in _slots(span, block_size)]
    parts = _on_device([slots, *_columns(decodes, block_size), *_columns(prefills, block_size), sums], device)
    return TablePlan(
        slots=next(parts),
        decodes=_tables(parts, len(decodes)),
        splits=choose_splits(len(decodes), max((span.start + 1 for span, _ in decodes), default=1), device),
        prefills=_tables(parts, len(prefills)),
        row_sums=next(parts) if prefills else None,
        prefill_rows=sums[-1],
    )


def choose_splits(sequences: int, longest: int, device: torch.device) -> int:
    """Into how many parts each sequence's positions are split: enough to keep the processors busy, not more.

    A power of two, for each number is a kernel of its own. KV heads aren't known here: with several there is more work
    than this counts on, which does no harm.
    """
    if not sequences:
        return 1
    wanted = min(-(-_programs(device) // sequences), longest // _SPLIT_POSITIONS_MIN, _SPLITS_MAX)
    return 1 << max(wanted - 1, 0).bit_length()


def _programs(device: torch.device) -> int:
    """How many programs of one KV head each fill a device."""
    if device.type != "cuda":
        return 8
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def _slots(span: Span, block_size: int) -> Iterator[int]:
    for position in range(span.start, span.start + span.length):
        yield span.block_table[position // block_size] * block_size + position % block_size


def _columns(placed: Sequence[tuple[Span, int]], block_size: int) -> tuple[list[int], list[int], list[int]]:
    """First rows, lengths, and the padded tables one after the other."""
    counts = [-(-(span.start + span.length) // block_size) for span, _ in placed]
    width = max(counts, default=0)
    blocks = []
    for (span, _), count in zip(placed, counts, strict=True):
        blocks += [*span.block_table[:count], *([0] * (width - count))]
    return [row for _, row in placed], [span.start + span.length for span, _ in placed], blocks


def _on_device(parts: Sequence[list[int]], device: torch.device) -> Iterator[Tensor]:
    """All lists as int32 in one transfer, which the host doesn't wait for."""
    joined = torch.tensor([number for part in parts for number in part], dtype=torch.int32)
    if device.type == "cuda":
        joined = joined.pin_memory().to(device, non_blocking=True)
    return iter(torch.split(joined, [len(part) for part in parts]))


def _tables(parts: Iterator[Tensor], sequences: int) -> Tables | None:
    first_rows, lengths, blocks = next(parts), next(parts), next(parts)
    return Tables(first_rows, lengths, blocks.view(sequences, -1)) if sequences else None
