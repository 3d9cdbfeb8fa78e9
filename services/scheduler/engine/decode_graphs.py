"""Decodes as recorded graphs: a step of single rows costs one launch instead of hundreds.

A CUDA graph replays kernels over the memory that it was recorded with. So a step's ids, positions, slots and block
tables are copied into buffers that stay; and a graph is recorded for some batch sizes, the buckets, into which a step
is filled up with rows of no sequence: their slot is -1 and their length 0, so they write and read nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.progress import track

from kernels.paged_attention.tables import TablePlan, Tables, choose_splits
from services.scheduler.engine.api import Slice
from services.scheduler.engine.forward import Forward
from services.scheduler.model.decoder import Decoder, ForwardBatch
from services.scheduler.model.kv_cache import KvCache

Tensor = torch.Tensor
Replay = Callable[[], Tensor]

BUCKETS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)
_HEADERS = 5  # columns of a buffer's row before its block table
_WARM_UPS = 2  # runs before a recording, in which kernels are compiled and libraries make their workspaces


@dataclass(frozen=True, slots=True)
class DecodeBuffer:
    """A step's numbers, int32, on the host and on the device: a row a sequence.

    Its columns are token, position, slot, length, row, and then the block table.
    """

    host: Tensor
    device: Tensor

    @staticmethod
    def of(rows: int, blocks: int, device: torch.device) -> DecodeBuffer:
        """Empty rows for sequences of so many blocks."""
        host = torch.zeros(rows, _HEADERS + blocks, dtype=torch.int32)
        host = host.pin_memory() if device.type == "cuda" else host
        return DecodeBuffer(host, host.to(device, copy=True))

    def fill(self, slices: Sequence[Slice], bucket: int, block_size: int) -> None:
        """Writes the slices' rows, and rows of no sequence up to the bucket; copies them to the device."""
        numbers = self.host.numpy()
        for row, s in enumerate(slices):
            table, place = s.block_table, s.start // block_size
            slot = table[place] * block_size + s.start % block_size
            numbers[row, :_HEADERS] = s.token_ids[0], s.start, slot, s.start + 1, row
            numbers[row, _HEADERS : _HEADERS + place + 1] = table[: place + 1]
        for row in range(len(slices), bucket):
            numbers[row, :_HEADERS] = 0, 0, -1, 0, row
        self.device[:bucket].copy_(self.host[:bucket], non_blocking=True)

    def batch(self, bucket: int, splits: int) -> ForwardBatch:
        """The first rows as what the model computes; reads the buffer anew in each run."""
        tokens, positions, slots, lengths, rows = self.device[:bucket, :_HEADERS].T.contiguous()
        tables = Tables(rows, lengths, self.device[:bucket, _HEADERS:])
        plan = TablePlan(slots, tables, splits, prefills=None, row_sums=None, prefill_rows=0)
        return ForwardBatch(tokens, positions, plan, rows)


class DecodeGraphs:
    """A Forward that replays what it can, and leaves other steps to another one."""

    def __init__(
        self,
        otherwise: Forward,
        model: Decoder,
        cache: KvCache,
        *,
        context_length: int,
        buckets: Sequence[int] = BUCKETS,
    ) -> None:
        self._otherwise = otherwise
        self._block_size = cache.block_size
        self._device = cache.keys.device
        self._buckets = sorted(buckets)
        blocks = -(-context_length // cache.block_size)
        self._buffer = DecodeBuffer.of(self._buckets[-1], blocks, self._device)
        self._buffer.fill((), self._buckets[-1], cache.block_size)
        self._pool = torch.cuda.graph_pool_handle() if self._device.type == "cuda" else None
        runs = {bucket: self._run(model, cache, bucket, context_length) for bucket in self._buckets}
        self._replays = self._record(runs) if self._device.type == "cuda" else runs

    def __call__(self, slices: Sequence[Slice]) -> Tensor:
        """Logits as a Forward gives them; valid until the next call."""
        if len(slices) > self._buckets[-1] or not all(s.samples and len(s.token_ids) == 1 for s in slices):
            return self._otherwise(slices)
        bucket = next(bucket for bucket in self._buckets if bucket >= len(slices))
        self._buffer.fill(slices, bucket, self._block_size)
        return self._replays[bucket]()[: len(slices)]

    def _run(self, model: Decoder, cache: KvCache, bucket: int, context_length: int) -> Replay:
        splits = choose_splits(bucket, context_length, self._device)
        return lambda: model.forward(self._buffer.batch(bucket, splits), cache)

    def _record(self, runs: dict[int, Replay]) -> dict[int, Replay]:
        """The largest first, for the smaller ones fit into the memory that it took; with a bar on a terminal."""
        largest_first = sorted(runs, reverse=True)
        hidden = not sys.stderr.isatty()
        shown = track(largest_first, "recording decodes", console=Console(stderr=True), transient=True, disable=hidden)
        return {bucket: self._recorded(runs[bucket]) for bucket in shown}

    @torch.inference_mode()
    def _recorded(self, run: Replay) -> Replay:
        """Warms up and records on a stream of its own, as recording asks for."""
        stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]  # PyTorch has no types for it
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for _ in range(_WARM_UPS):
                run()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=stream):
            logits = run()

        def replay() -> Tensor:
            graph.replay()
            return logits

        return replay
