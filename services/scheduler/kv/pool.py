"""The KV memory as numbered blocks: who holds which, exactly. The memory itself belongs to the engine."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class BlockPool:
    """A stack of free block numbers, with every block's state beside it so that none is ever given away twice."""

    __slots__ = ("_free", "_held", "total")

    def __init__(self, total: int) -> None:
        assert total > 0, total
        self.total = total
        self._free = list(range(total - 1, -1, -1))
        self._held = bytearray(total)

    @property
    def free(self) -> int:
        """Blocks that nobody holds."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Gives out `count` blocks; the caller has looked at `free` before."""
        assert 0 <= count <= len(self._free), (count, len(self._free))
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            assert not self._held[block], block
            self._held[block] = 1
        return taken

    def give_back(self, blocks: Iterable[int]) -> None:
        """Takes blocks back; each must be held."""
        for block in blocks:
            assert self._held[block], block
            self._held[block] = 0
            self._free.append(block)

    def check_integrity(self, tables: Iterable[Sequence[int]]) -> None:
        """Raises AssertionError unless every block is either free or in exactly one of the block tables.

        Its time grows with the blocks that are held, and hardly with all: a block's state changes at every move, so one
        that is free twice, or free and held, has failed there.
        """
        held = [block for table in tables for block in table]
        assert len(held) + len(self._free) == self.total, (len(held), len(self._free), self.total)
        assert self._held.count(1) == len(set(held)) == len(held), "a block is in two tables, or in none"
        assert all(self._held[block] for block in held), "a free block is in a table"
