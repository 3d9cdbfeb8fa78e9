"""The engine that computes: a model over paged keys and values, and a sampler, on one PyTorch device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.ops import Ops
from kernels.paged_attention import Span
from services.scheduler.engine.api import EngineInfo, Failed, Sampled, SamplingSpec, SequenceKey, Slice
from services.scheduler.engine.cache_size import choose_context
from services.scheduler.engine.operations import choose_ops
from services.scheduler.engine.sampling.sampler import Sampler
from services.scheduler.engine.settings import (
    TorchEngineConfig,
    choose_blocks,
    choose_device,
    choose_dtype,
)
from services.scheduler.model.config import Described
from services.scheduler.model.decoder import ForwardBatch
from services.scheduler.model.kv_cache import KvCache, token_bytes
from services.scheduler.model.loading import Model, load_model


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """What a start-up report says of an engine; KV capacity in tokens and in bytes."""

    architecture: str
    parameters: int
    device: str
    dtype: str
    operations: str
    context_length: int
    kv_tokens: int
    kv_bytes: int


class TorchEngine:
    """An Engine over a model; made by `load_engine`."""

    def __init__(self, model: Model, cache: KvCache, sampler: Sampler, ops: Ops, info: EngineInfo) -> None:
        self._model = model
        self._cache = cache
        self._sampler = sampler
        self._ops = ops
        self._info = info

    @property
    def info(self) -> EngineInfo:
        """What this engine can do."""
        return self._info

    @property
    def report(self) -> EngineReport:
        """For the start-up report."""
        keys = self._cache.keys
        tokens = self._info.total_blocks * self._info.block_size
        return EngineReport(
            architecture=self._model.config.architecture,
            parameters=self._model.parameters,
            device=str(keys.device),
            dtype=str(keys.dtype).removeprefix("torch."),
            operations=self._ops.name,
            context_length=self._info.context_length,
            kv_tokens=tokens,
            kv_bytes=tokens * token_bytes(self._model.config, keys.dtype),
        )

    def open(self, key: SequenceKey, spec: SamplingSpec, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> None:
        """Takes up a sequence; raises ValueError for a bias on an id out of the vocabulary."""
        self._sampler.open(key, spec, prompt_ids, output_ids)

    @torch.inference_mode()
    def step(self, slices: Sequence[Slice]) -> list[Sampled | Failed]:
        """Runs one forward pass; a row whose logits aren't finite fails alone."""
        if not slices:
            return []
        self._cache.clear(_begun_blocks(slices, self._cache.block_size))
        batch = _batch(slices, self._ops, self._cache)
        logits = self._model.forward(batch, self._cache)
        return self._sampler.sample(logits.float(), [s for s in slices if s.samples])

    def close(self, key: SequenceKey) -> None:
        """Forgets a sequence."""
        self._sampler.close(key)


def load_engine(config: TorchEngineConfig, *, ops: Ops | None = None) -> TorchEngine:
    """Loads a model folder into an engine.

    Raises UnsupportedModelError for a model that can't be served, ValueError for settings that can't be met.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    device = choose_device(config.device)
    chosen = ops or choose_ops(device, deterministic=config.deterministic)
    dtype = choose_dtype(config.dtype, device)
    model = load_model(config.model, chosen, dtype=dtype, device=device)
    shape = model.config
    context = choose_context(config.context_length, shape)
    blocks = choose_blocks(config, shape, dtype, device)
    cache = KvCache(shape, blocks=blocks, block_size=config.block_size, dtype=dtype, device=device)
    info = _info(config, shape, context, blocks)
    sampler = Sampler(shape.vocab_size, device, row_by_row=config.deterministic)
    return TorchEngine(model, cache, sampler, chosen, info)


def _info(config: TorchEngineConfig, shape: Described, context: int, blocks: int) -> EngineInfo:
    return EngineInfo(
        model_id=config.model.resolve().name,
        vocab_size=shape.vocab_size,
        context_length=context,
        block_size=config.block_size,
        total_blocks=blocks,
        eos_token_ids=shape.eos_token_ids,
    )


def _batch(slices: Sequence[Slice], ops: Ops, cache: KvCache) -> ForwardBatch:
    """Lays the slices' ids out row after row."""
    device = cache.keys.device
    token_ids: list[int] = []
    positions: list[int] = []
    logit_rows: list[int] = []
    for s in slices:
        token_ids += s.token_ids
        positions += range(s.start, s.start + len(s.token_ids))
        if s.samples:
            logit_rows.append(len(token_ids) - 1)
    spans = [Span(s.start, len(s.token_ids), s.block_table) for s in slices]
    return ForwardBatch(
        token_ids=torch.tensor(token_ids, device=device),
        positions=torch.tensor(positions, device=device),
        attention_plan=ops.plan_attention(spans, cache.block_size, device),
        logit_rows=torch.tensor(logit_rows, dtype=torch.int64, device=device),
    )


def _begun_blocks(slices: Sequence[Slice], block_size: int) -> list[int]:
    """The last block of each slice, where the slice begins it without filling it."""
    begun = []
    for s in slices:
        end = s.start + len(s.token_ids)
        first_of_block = end // block_size * block_size
        if s.start <= first_of_block < end:
            begun.append(s.block_table[first_of_block // block_size])
    return begun
