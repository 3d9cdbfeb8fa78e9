"""Which rows of a step attend to which blocks: worked out once a step, used by every layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

_WASTED_BLOCKS_MAX = 32  # per group of decodes; to read so much padding costs about as much as one more group


@dataclass(frozen=True, slots=True)
class Span:
    """One sequence's rows in a step: `length` new positions from `start` on, in the blocks of `block_table`."""

    start: int
    length: int
    block_table: Sequence[int]


@dataclass(frozen=True, slots=True)
class Prefill:
    """A span of several rows; `blocks` hold positions 0 to `first_position` + rows, None when nothing is cached."""

    first_row: int
    rows: int
    first_position: int
    blocks: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Single rows of similar lengths: `rows` (n,), `blocks` (n, width) padded, `mask` (n, 1, 1, width * block_size).

    The mask is True where a position exists. Padding repeats a sequence's own first block.
    """

    rows: torch.Tensor
    blocks: torch.Tensor
    mask: torch.Tensor


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What attention needs to know of a step: `slots` (rows,) for the writes, prefills and groups of decodes."""

    slots: torch.Tensor
    prefills: tuple[Prefill, ...]
    decodes: tuple[DecodeGroup, ...]


def plan_attention(spans: Sequence[Span], block_size: int, device: torch.device) -> AttentionPlan:
    """Plans for rows laid out span after span; a span of one row is a decode, wherever it stands in its sequence."""
    prefills: list[Prefill] = []
    decodes: list[tuple[int, Span]] = []
    slots: list[int] = []
    for span in spans:
        row = len(slots)
        slots += _slots(span, block_size)
        if span.length == 1:
            decodes.append((row, span))
        else:
            prefills.append(_prefill(row, span, block_size, device))
    groups = tuple(_decode_group(group, block_size, device) for group in _grouped(decodes, block_size))
    return AttentionPlan(torch.tensor(slots, device=device), tuple(prefills), groups)


def _slots(span: Span, block_size: int) -> list[int]:
    table, positions = span.block_table, range(span.start, span.start + span.length)
    return [table[position // block_size] * block_size + position % block_size for position in positions]


def _prefill(row: int, span: Span, block_size: int, device: torch.device) -> Prefill:
    blocks = None
    if span.start:
        blocks = torch.tensor(list(span.block_table[: _blocks(span, block_size)]), device=device)
    return Prefill(row, span.length, span.start, blocks)


def _blocks(span: Span, block_size: int) -> int:
    return -(-(span.start + span.length) // block_size)


def _grouped(decodes: list[tuple[int, Span]], block_size: int) -> list[list[tuple[int, Span]]]:
    """Longest first, a new group whenever padding up to the group's longest would waste too much."""
    groups: list[list[tuple[int, Span]]] = []
    widest = wasted = 0
    for row, span in sorted(decodes, key=lambda decode: -decode[1].start):
        blocks = _blocks(span, block_size)
        wasted += widest - blocks
        if not groups or wasted > _WASTED_BLOCKS_MAX:
            groups.append([])
            widest, wasted = blocks, 0
        groups[-1].append((row, span))
    return groups


def _decode_group(group: list[tuple[int, Span]], block_size: int, device: torch.device) -> DecodeGroup:
    width = _blocks(group[0][1], block_size)
    tables = []
    for _, span in group:
        table = list(span.block_table[: _blocks(span, block_size)])
        tables.append(table + table[:1] * (width - len(table)))
    lengths = torch.tensor([span.start + 1 for _, span in group], device=device)
    mask = torch.arange(width * block_size, device=device) < lengths.unsqueeze(1)
    rows = torch.tensor([row for row, _ in group], device=device)
    return DecodeGroup(rows, torch.tensor(tables, device=device), mask[:, None, None, :])
