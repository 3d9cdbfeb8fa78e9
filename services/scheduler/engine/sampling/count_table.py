"""How often each id stands in the outputs of sequences with penalties: a table on the device that kernels count in."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.sampling.options import PROMPT_COUNT

Tensor = torch.Tensor


class CountTable:
    """Rows (slots, vocab_size), int32, handed out and taken back; it grows to as many as were ever needed at once."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self.counts = torch.zeros(1, vocab_size, dtype=torch.int32, device=device)
        self._free = [0]

    def take(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> int:
        """A row that holds these ids."""
        if not self._free:
            self._grow()
        slot = self._free.pop()
        row = self.counts[slot]
        row.zero_()
        if output_ids:
            ids = self._on_device(output_ids)
            row.index_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))
        if prompt_ids:
            row[self._on_device(sorted(set(prompt_ids)))] += PROMPT_COUNT
        return slot

    def give_back(self, slot: int) -> None:
        """Its sequence is gone."""
        self._free.append(slot)

    def _grow(self) -> None:
        size = len(self.counts)
        self.counts = torch.cat((self.counts, torch.zeros_like(self.counts)))
        self._free += range(size, 2 * size)

    def _on_device(self, ids: Sequence[int]) -> Tensor:
        return torch.tensor(list(ids), dtype=torch.int64).to(self.counts.device, non_blocking=True)
