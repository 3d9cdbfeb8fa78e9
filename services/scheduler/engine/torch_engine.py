"""The engine that computes: a model over paged keys and values, and a sampler, on one PyTorch device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.ops import Ops
from services.scheduler.engine.api import Answer, EngineInfo, SamplingSpec, SequenceKey, Slice
from services.scheduler.engine.cache_size import choose_context
from services.scheduler.engine.forward import EagerForward, Forward
from services.scheduler.engine.operations import choose_ops
from services.scheduler.engine.sampling.prompt_scores import score_prompts
from services.scheduler.engine.sampling.protocol import StepSampler
from services.scheduler.engine.sampling.sampler import Sampler
from services.scheduler.engine.settings import (
    TorchEngineConfig,
    choose_blocks,
    choose_device,
    choose_dtype,
    choose_kv_dtype,
)
from services.scheduler.model.config import Described
from services.scheduler.model.decoder import Decoder
from services.scheduler.model.kv_cache import KvCache, token_bytes
from services.scheduler.model.loading import Model, load_model


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineReport:
    """What a start-up report says of an engine; KV capacity in tokens and in bytes."""

    architecture: str
    parameters: int
    device: str
    dtype: str
    kv_dtype: str
    operations: str
    context_length: int
    kv_tokens: int
    kv_bytes: int


class TorchEngine:
    """An Engine over a model; made by `load_engine`."""

    def __init__(self, forward: Forward, sampler: StepSampler, info: EngineInfo, report: EngineReport) -> None:
        self._forward = forward
        self._sampler = sampler
        self._info = info
        self.report = report

    @property
    def info(self) -> EngineInfo:
        """What this engine can do."""
        return self._info

    def open(self, key: SequenceKey, spec: SamplingSpec, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> None:
        """Takes up a sequence; raises ValueError for a bias on an id out of the vocabulary."""
        self._sampler.open(key, spec, prompt_ids, output_ids)

    @torch.inference_mode()
    def step(self, slices: Sequence[Slice]) -> list[Answer]:
        """Runs one forward pass; a row whose logits aren't finite fails alone."""
        if not slices:
            return []
        logits = self._forward(slices)
        sampling, scored = [s for s in slices if s.samples], [s for s in slices if s.scored_ids]
        scores = score_prompts(logits[len(sampling) :], scored)
        return [*self._sampler.sample(logits[: len(sampling)].float(), sampling), *scores]

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
    kv_dtype = choose_kv_dtype(config.kv_dtype, dtype, device, chosen)
    model = load_model(config.model, chosen, dtype=dtype, device=device, deterministic=config.deterministic)
    shape = model.config
    context = choose_context(config.context_length, shape)
    blocks = choose_blocks(config, shape, kv_dtype, device)
    cache = KvCache(shape, blocks=blocks, block_size=config.block_size, dtype=kv_dtype, device=device)
    info = _info(config, shape, context, blocks)
    forward: Forward = EagerForward(model, cache, chosen)
    sampler: StepSampler = Sampler(shape.vocab_size, device, row_by_row=config.deterministic)
    if chosen.name == "triton":
        forward, sampler = _on_a_gpu(forward, model, cache, info)
    return TorchEngine(forward, sampler, info, _report(model, cache, dtype, info))


def _on_a_gpu(forward: Forward, model: Model, cache: KvCache, info: EngineInfo) -> tuple[Forward, StepSampler]:
    """What only pays there, and needs the package triton: recorded decodes, and sampling without a wait."""
    from services.scheduler.engine.decode_graphs import DecodeGraphs
    from services.scheduler.engine.sampling.device_sampler import DeviceSampler

    if isinstance(model, Decoder):  # what transformers computes may wait for the device, which can't be recorded
        forward = DecodeGraphs(forward, model, cache, context_length=info.context_length)
    return forward, DeviceSampler(info.vocab_size, cache.keys.device)


def _report(model: Model, cache: KvCache, dtype: torch.dtype, info: EngineInfo) -> EngineReport:
    tokens, kept = info.total_blocks * info.block_size, cache.keys.dtype
    return EngineReport(
        architecture=model.config.architecture,
        parameters=model.parameters,
        device=str(cache.keys.device),
        dtype=_name(dtype),
        kv_dtype=_name(kept),
        operations=model.operations,
        context_length=info.context_length,
        kv_tokens=tokens,
        kv_bytes=tokens * token_bytes(model.config, kept),
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _info(config: TorchEngineConfig, shape: Described, context: int, blocks: int) -> EngineInfo:
    return EngineInfo(
        model_id=config.model.resolve().name,
        vocab_size=shape.vocab_size,
        context_length=context,
        block_size=config.block_size,
        total_blocks=blocks,
        eos_token_ids=shape.eos_token_ids,
    )
