"""A model inside the step library: parts are put in once, then every step is one call."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import accumulate, chain

import numpy as np

from kernels.cpu.library import (
    Bf16Array,
    CBatch,
    FloatArray,
    Format,
    IntArray,
    Shape,
    best_kernels,
    check,
    load_library,
    open_engine,
)


class Part(IntEnum):
    """tailrace_part: what a model consists of. Matrices are (outputs, inputs); QKV joins the rows of all three."""

    EMBEDDING = 0
    FINAL_NORM = 1
    HEAD = 2
    ATTENTION_NORM = 3
    QKV = 4
    QKV_BIAS = 5
    QUERY_NORM = 6
    KEY_NORM = 7
    ATTENTION_OUT = 8
    ATTENTION_OUT_BIAS = 9
    ATTENTION_OUT_NORM = 10
    FEED_FORWARD_NORM = 11
    GATE = 12
    GATE_BIAS = 13
    UP = 14
    UP_BIAS = 15
    DOWN = 16
    DOWN_BIAS = 17
    FEED_FORWARD_OUT_NORM = 18


@dataclass(frozen=True, slots=True)
class Batch:
    """A step's rows, sequence after sequence: their ids, where each sequence goes on, its blocks, who wants logits.

    `wanted`: of how many of each sequence's last ids the logits are wanted. `scored`: of how many of its first ids as
    well; empty for none.
    """

    tokens: Sequence[Sequence[int]]
    first_positions: Sequence[int]
    block_tables: Sequence[Sequence[int]]
    wanted: Sequence[int]
    scored: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """For each wanted row: logits (wanted rows, vocab_size), and of each the first largest one, NaN if one is.

    `scored_logits` (scored rows, vocab_size) are those of the rows that `scored` counts.
    All of it is overwritten by the next step.
    """

    logits: FloatArray
    best_tokens: IntArray
    best_logits: FloatArray
    scored_logits: FloatArray


_GIVEN = {np.dtype(np.float32): Format.FP32, np.dtype(np.uint16): Format.BF16}


class CpuModel:
    """A model and its cache, in memory of the library; freed with this object."""

    def __init__(self, shape: Shape, *, threads: int, kernels: str = "") -> None:
        """`kernels` names an instruction set; empty for the fastest one here. Raises LibraryMissing, ValueError."""
        self._library = load_library()
        self._engine = open_engine(shape, kernels, threads)
        weakref.finalize(self, self._library.tailrace_close, self._engine)
        self.shape = shape
        self.kernels = kernels or best_kernels()
        self._stride = self._library.tailrace_logits_stride(self._engine)
        self._logits: FloatArray = np.empty((0, self._stride), dtype=np.float32)
        self._best_tokens: IntArray = np.empty(0, dtype=np.int32)
        self._best_logits: FloatArray = np.empty(0, dtype=np.float32)

    @property
    def weight_bytes(self) -> int:
        """What the packed weights take."""
        return int(self._library.tailrace_weight_bytes(self._engine))

    def put(self, part: Part, numbers: FloatArray | Bf16Array, layer: int = 0) -> None:
        """Packs one part; the array isn't kept. Raises ValueError when its size doesn't fit the shape."""
        given = _GIVEN.get(numbers.dtype)
        if given is None or not numbers.flags.c_contiguous:
            raise ValueError(f"{part.name} must be contiguous numbers, fp32 or the bits of bf16")
        check(self._library.tailrace_put(self._engine, part, layer, numbers.ctypes.data, given, numbers.size))

    def step(self, batch: Batch) -> StepResult:
        """Computes all rows and writes their keys and values; raises ValueError for a batch that can't be right."""
        row_starts = _array([0, *accumulate(map(len, batch.tokens))])
        table_starts = _array([0, *accumulate(map(len, batch.block_tables))])
        tokens = _array(chain.from_iterable(batch.tokens))
        tables = _array(chain.from_iterable(batch.block_tables))
        firsts = _array(batch.first_positions)
        ends = row_starts[1:].tolist()
        last_rows = [row for end, count in zip(ends, batch.wanted, strict=True) for row in range(end - count, end)]
        scored_rows = [row_starts[number] + n for number, count in enumerate(batch.scored) for n in range(count)]
        wanted_rows = _array([*last_rows, *scored_rows])
        wanted, last = len(wanted_rows), len(last_rows)
        self._reserve(wanted)
        call = CBatch(
            rows=len(tokens),
            sequences=len(batch.tokens),
            wanted=wanted,
            tokens=tokens.ctypes.data,
            row_starts=row_starts.ctypes.data,
            first_positions=firsts.ctypes.data,
            table_starts=table_starts.ctypes.data,
            block_tables=tables.ctypes.data,
            wanted_rows=wanted_rows.ctypes.data,
            logits=self._logits.ctypes.data,
            best_tokens=self._best_tokens.ctypes.data,
            best_logits=self._best_logits.ctypes.data,
        )
        check(self._library.tailrace_step(self._engine, ctypes.byref(call)))
        logits = self._logits[:wanted, : self.shape.vocab_size]
        return StepResult(logits[:last], self._best_tokens[:last], self._best_logits[:last], logits[last:])

    def _reserve(self, wanted: int) -> None:
        if len(self._logits) < wanted:
            self._best_tokens = np.empty(wanted, dtype=np.int32)
            self._best_logits = np.empty(wanted, dtype=np.float32)
            self._logits = np.empty((wanted, self._stride), dtype=np.float32)  # last: it tells how many there are


def _array(numbers: object) -> IntArray:
    return np.array(numbers if isinstance(numbers, list | tuple | range) else list(numbers), dtype=np.int32)  # type: ignore[call-overload]  # any iterable of int
