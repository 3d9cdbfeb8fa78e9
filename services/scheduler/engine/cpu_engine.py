"""The engine for CPUs: the step library computes a whole step in one call; the sampler draws what isn't greedy.

PyTorch isn't imported: it would take 190 MB of memory, and seconds at the start.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kernels.cpu import Batch, CpuModel, Format, StepResult, block_bytes
from services.scheduler.engine.api import (
    Answer,
    EngineInfo,
    SamplingSpec,
    SequenceKey,
    Slice,
)
from services.scheduler.engine.cache_size import CacheSettings, choose_context, cpu_blocks
from services.scheduler.engine.sampling.host_logprobs import score_prompts
from services.scheduler.engine.sampling.host_sampler import HostSampler
from services.scheduler.model.config import ModelConfig
from services.scheduler.model.config_json import read_config
from services.scheduler.model.four_bits import had_four_bits
from services.scheduler.model.packed import pack_weights, shape_of

STEP_TOKENS = 256
"""Longer steps compute prefills hardly any faster, and delay whoever decodes beside them."""

FORMATS = {"int8": Format.INT8, "int4": Format.INT4, "bf16": Format.BF16, "fp32": Format.FP32}


@dataclass(frozen=True, kw_only=True)
class CpuEngineConfig(CacheSettings):
    """`weights_format` is one of FORMATS, each with its own way to keep keys and values (`Format.kv`), or "auto": int4
    for a checkpoint whose weights had no more bits, otherwise int8.

    `threads` is the number of cores that this process may use when None; `kernels` the fastest instruction set here
    when empty. A result never depends on a row's neighbours.
    """

    model: Path
    weights_format: str = "auto"
    threads: int | None = None
    kernels: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"threads is {self.threads}; it must be at least 1")
        if self.weights_format not in ("auto", *FORMATS):
            raise ValueError(f"weights_format is {self.weights_format!r}; it must be auto, {', '.join(FORMATS)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuEngineReport:
    """What a start-up report says of this engine; KV capacity in tokens and in bytes."""

    architecture: str
    parameters: int
    weights_format: str
    weight_bytes: int
    kv_format: str
    kernels: str
    threads: int
    context_length: int
    kv_tokens: int
    kv_bytes: int


class CpuEngine:
    """An Engine over a packed model; made by `load_cpu_engine`."""

    def __init__(self, model: CpuModel, sampler: HostSampler, info: EngineInfo, report: CpuEngineReport) -> None:
        self._model = model
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

    def step(self, slices: Sequence[Slice]) -> list[Answer]:
        """Runs one forward pass; a row whose logits aren't finite fails alone."""
        if not slices:
            return []
        wanted = [number for number, s in enumerate(slices) if s.samples]
        result = self._model.step(
            Batch(
                tokens=[s.token_ids for s in slices],
                first_positions=[s.start for s in slices],
                block_tables=[s.block_table for s in slices],
                wanted=wanted,
                scored=[len(s.scored_ids) for s in slices],
            )
        )
        answers = self._answers([slices[number] for number in wanted], result)
        return [*answers, *score_prompts(result.scored_logits, [s for s in slices if s.scored_ids])]

    def close(self, key: SequenceKey) -> None:
        """Forgets a sequence."""
        self._sampler.close(key)

    def _answers(self, slices: Sequence[Slice], result: StepResult) -> list[Answer]:
        """Greedy ones from what the library found, without touching their logits; the others from the sampler."""
        sampler = self._sampler
        best = zip(slices, result.logits, result.best_tokens.tolist(), result.best_logits.tolist(), strict=True)
        return [
            sampler.best(s, token, logit) if sampler.takes_best(s) else sampler.sample(s, logits)
            for s, logits, token, logit in best
        ]


def load_cpu_engine(config: CpuEngineConfig) -> CpuEngine:
    """Loads a model folder into an engine.

    Raises LibraryMissing, UnsupportedModelError for a model that can't be served, ValueError for settings that can't
    be met.
    """
    model_config = read_config(config.model)
    context = choose_context(config.context_length, model_config)
    stored = stored_format(config, model_config)
    bytes_of_block = _block_bytes(config, stored, model_config)
    blocks = cpu_blocks(config, model_config, bytes_of_block)
    threads = config.threads or len(os.sched_getaffinity(0))
    shape = shape_of(
        model_config,
        weights_format=stored,
        blocks=blocks,
        block_size=config.block_size,
    )
    model = CpuModel(shape, threads=threads, kernels=config.kernels)
    parameters = pack_weights(config.model, model_config, model)
    info = EngineInfo(
        model_id=config.model.resolve().name,
        vocab_size=model_config.vocab_size,
        context_length=context,
        block_size=config.block_size,
        total_blocks=blocks,
        eos_token_ids=model_config.eos_token_ids,
        step_tokens=STEP_TOKENS,
    )
    report = CpuEngineReport(
        architecture=model_config.architecture,
        parameters=parameters,
        weights_format=stored.name.lower(),
        weight_bytes=model.weight_bytes,
        kv_format=stored.kv.name.lower(),
        kernels=model.kernels,
        threads=threads,
        context_length=context,
        kv_tokens=blocks * config.block_size,
        kv_bytes=blocks * bytes_of_block,
    )
    return CpuEngine(model, HostSampler(model_config.vocab_size), info, report)


def stored_format(config: CpuEngineConfig, model: ModelConfig) -> Format:
    """How weights are stored, and by that keys and values; raises UnsupportedModelError."""
    if config.weights_format != "auto":
        return FORMATS[config.weights_format]
    return Format.INT4 if had_four_bits(config.model, model) else Format.INT8


def _block_bytes(config: CpuEngineConfig, stored: Format, model: ModelConfig) -> int:
    return block_bytes(
        stored.kv,
        layers=len(model.layers),
        kv_heads=model.kv_heads,
        head_dim=model.head_dim,
        block_size=config.block_size,
        kernels=config.kernels,
    )
