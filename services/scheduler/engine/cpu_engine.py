"""The engine for CPUs: the step library computes a whole step in one call; the sampler draws what isn't greedy.

PyTorch isn't imported: it would take 190 MB of memory, and seconds at the start.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from kernels.cpu import Batch, CpuModel, Format, StepResult, block_bytes
from services.scheduler.engine.api import (
    Answer,
    EngineInfo,
    Failed,
    Sampled,
    SamplingSpec,
    SequenceKey,
    Slice,
    Speculated,
)
from services.scheduler.engine.blame import blamed
from services.scheduler.engine.cache_size import CacheSettings, choose_context, cpu_blocks
from services.scheduler.engine.drafts import Drafts
from services.scheduler.engine.sampling.host_logprobs import score_prompts
from services.scheduler.engine.sampling.host_sampler import HostSampler
from services.scheduler.model.config import ModelConfig
from services.scheduler.model.config_json import read_config
from services.scheduler.model.four_bits import had_four_bits
from services.scheduler.model.packed import pack_weights, shape_of

DRAFT_TOKENS = 7
"""Ten bring no more: a mistake or a block's end comes first."""

STEP_TOKENS = 256
"""Longer steps compute prefills hardly any faster, and delay whoever decodes beside them."""

FORMATS = {"int8": Format.INT8, "int4": Format.INT4, "bf16": Format.BF16, "fp32": Format.FP32}


@dataclass(frozen=True, kw_only=True)
class CpuEngineConfig(CacheSettings):
    """`weights_format` is one of FORMATS, each with its own way to keep keys and values (`Format.kv`), or "auto": int4
    for a checkpoint whose weights had no more bits, otherwise int8.

    `threads` is the number of cores that this process may use when None; `kernels` the fastest instruction set here
    when empty. At most `draft_tokens` ids are guessed and computed behind a decode's own. A result never depends on a
    row's neighbours, nor on a guess.
    """

    model: Path
    weights_format: str = "auto"
    threads: int | None = None
    kernels: str = ""
    draft_tokens: int = DRAFT_TOKENS

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"threads is {self.threads}; it must be at least 1")
        if self.draft_tokens < 0:
            raise ValueError(f"draft_tokens is {self.draft_tokens}; it must be 0 or more")
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
    draft_tokens: int
    context_length: int
    kv_tokens: int
    kv_bytes: int


class CpuEngine:
    """An Engine over a packed model; made by `load_cpu_engine`."""

    def __init__(
        self, model: CpuModel, sampler: HostSampler, drafts: Drafts, info: EngineInfo, report: CpuEngineReport
    ) -> None:
        self._model = model
        self._sampler = sampler
        self._drafts = drafts
        self._info = info
        self.report = report

    @property
    def info(self) -> EngineInfo:
        """What this engine can do."""
        return self._info

    def open(self, key: SequenceKey, spec: SamplingSpec, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> None:
        """Takes up a sequence; raises ValueError for a bias on an id out of the vocabulary."""
        self._sampler.open(key, spec, prompt_ids, output_ids)
        self._drafts.open(key, prompt_ids, output_ids)

    def step(self, slices: Sequence[Slice]) -> list[Answer]:
        """Runs one forward pass; a row whose logits aren't finite fails alone."""
        if not slices:
            return []
        drafts = self._drafts.guess(slices)
        result = self._model.step(
            Batch(
                tokens=[(*s.token_ids, *draft) for s, draft in zip(slices, drafts, strict=True)],
                first_positions=[s.start for s in slices],
                block_tables=[s.block_table for s in slices],
                wanted=[s.samples + len(draft) for s, draft in zip(slices, drafts, strict=True)],
                scored=[len(s.scored_ids) for s in slices],
            )
        )
        scores = score_prompts(result.scored_logits, [s for s in slices if s.scored_ids])
        return [*self._answers(slices, drafts, result), *scores]

    def close(self, key: SequenceKey) -> None:
        """Forgets a sequence."""
        self._sampler.close(key)
        self._drafts.close(key)

    def _answers(self, slices: Sequence[Slice], drafts: Sequence[Sequence[int]], result: StepResult) -> list[Answer]:
        answers: list[Answer] = []
        rows, row = _Rows(self._sampler, result), 0
        for s, draft in zip(slices, drafts, strict=True):
            if not s.samples:
                continue
            answer = rows.draw(s, row)
            answers.append(answer)
            if isinstance(answer, Sampled):
                further = rows.draw_further(s, row, answer, draft) if draft else []
                if draft:
                    answers.append(Speculated(s.key, len(draft), further))
                self._drafts.learn(s.key, [answer.token_id, *(sampled.token_id for sampled in further)])
            row += 1 + len(draft)
        return answers


class _Rows:
    """A step's rows of logits, and how tokens are drawn from them."""

    def __init__(self, sampler: HostSampler, result: StepResult) -> None:
        self._sampler = sampler
        self._logits = result.logits
        self._best_tokens: list[int] = result.best_tokens.tolist()
        self._best_logits: list[float] = result.best_logits.tolist()

    def draw(self, s: Slice, row: int) -> Sampled | Failed:
        """A greedy one from what the library found, without touching its logits; another from the sampler."""
        try:
            if self._sampler.takes_best(s):
                return self._sampler.best(s, self._best_tokens[row], self._best_logits[row])
            return self._sampler.sample(s, self._logits[row])
        except Exception as error:  # noqa: BLE001  # the rows before have drawn theirs, and must not once more
            return blamed(s.key, error)

    def draw_further(self, s: Slice, row: int, first: Sampled, draft: Sequence[int]) -> list[Sampled]:
        """The tokens after `first`, for as long as the draft has guessed the one before."""
        tokens = [first]
        for place, guess in enumerate(draft, 1):
            if tokens[-1].token_id != guess:
                break
            answer = self.draw(replace(s, output_position=s.output_position + place), row + place)
            if isinstance(answer, Failed):
                break  # and again in a step of its own, where it counts
            tokens.append(answer)
        return tokens[1:]


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
        draft_tokens=config.draft_tokens,
    )
    report = CpuEngineReport(
        architecture=model_config.architecture,
        parameters=parameters,
        weights_format=stored.name.lower(),
        weight_bytes=model.weight_bytes,
        kv_format=stored.kv.name.lower(),
        kernels=model.kernels,
        threads=threads,
        draft_tokens=config.draft_tokens,
        context_length=context,
        kv_tokens=blocks * config.block_size,
        kv_bytes=blocks * bytes_of_block,
    )
    drafts = Drafts(config.draft_tokens, config.block_size)
    return CpuEngine(model, HostSampler(model_config.vocab_size), drafts, info, report)


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
