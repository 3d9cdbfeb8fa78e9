"""Makes the engine that the configuration asks for, tries it once, and tells what it is."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from services.protocol.hello import Hello, hello_of
from services.protocol.model_card import ModelCard, load_model_card
from services.runtime.config import ConfigError
from services.runtime.error_tree import PreconditionFailed
from services.scheduler.admission import longest_sequence
from services.scheduler.config import SchedulerConfig
from services.scheduler.engine.api import Engine, Failed, SamplingSpec, SequenceKey, Slice
from services.scheduler.engine.fake import FakeConfig, FakeEngine, FakeMode
from services.scheduler.model.errors import UnsupportedModelError

FAKE_CONTEXT_LENGTH = 8192
FAKE_KV_TOKENS = 1 << 20

_GPU_DEVICES = ("/dev/nvidiactl", "/dev/nvhost-ctrl-gpu", "/dev/nvgpu", "/dev/dxg", "/dev/kfd")
"""What a driver shows of a GPU: NVIDIA's, the same on its Tegra chips and under WSL, and AMD's."""


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """An engine that has computed a token, the card of its model where there is one, and what start-up reports."""

    engine: Engine
    card: ModelCard | None
    report: Mapping[str, object]

    def hello(self, epoch: int) -> Hello:
        """How this scheduler introduces itself; the context is what can be served, not what the model would allow."""
        info = self.engine.info
        hello = hello_of(epoch, self.card)
        return replace(
            hello,
            model_id=hello.model_id or info.model_id,
            vocab_size=info.vocab_size,
            context_length=longest_sequence(info),
        )


def load(config: SchedulerConfig) -> LoadedEngine:
    """Blocks until the engine can serve. Raises ConfigError for a model or a setting that can't be served."""
    try:
        card = load_model_card(config.model, model_id=config.model_id) if config.model is not None else None
        loaded = _LOADERS[config.engine](config, card)
    except (PreconditionFailed, UnsupportedModelError, ValueError) as error:
        raise ConfigError(str(error)) from error
    _warm_up(loaded.engine)
    return loaded


def _load_fake(config: SchedulerConfig, card: ModelCard | None) -> LoadedEngine:
    context = config.context_length or (card.context_length if card else FAKE_CONTEXT_LENGTH)
    engine = FakeEngine(
        FakeConfig(
            model_id=card.model_id if card else config.model_id or "fake",
            vocab_size=card.vocab_size if card else config.fake_vocab_size,
            context_length=context,
            block_size=config.block_size,
            total_blocks=max((config.kv_tokens or FAKE_KV_TOKENS) // config.block_size, 1),
            eos_token_ids=card.eos_token_ids if card else (config.fake_eos_token_id,),
            mode=FakeMode(config.fake_mode),
            first_id=config.fake_first_id,
            end_id=config.fake_end_id,
            pace_ms=config.fake_pace_ms,
            prefill_us_per_token=config.fake_prefill_us_per_token,
            draft_tokens=config.draft_tokens or 0,
            bad_output_id=config.fake_bad_output_id,
            step_error_id=config.fake_step_error_id,
        )
    )
    report = {"engine": "fake", "context_length": context, "kv_tokens": engine.info.total_blocks * config.block_size}
    return LoadedEngine(engine, card, report)


def _load_best(config: SchedulerConfig, card: ModelCard | None) -> LoadedEngine:
    """The CPU's step library where it can compute this, otherwise PyTorch, and then the report says why."""
    try:
        _expect_cpu(config)
        return _load_cpu(config, card)
    except (_NotForCpu, UnsupportedModelError) as reason:
        for key, default in (("weights_format", "auto"), ("draft_tokens", None)):
            if (asked := getattr(config, key)) not in (default, 0):
                raise ConfigError(f"{key} {asked} needs engine cpu: {reason}") from reason
        loaded = _load_torch(config, card)
        return replace(loaded, report={**loaded.report, "engine_cpu": f"not used: {reason}"})


class _NotForCpu(ValueError):
    """Why the CPU's step library won't be used."""


def _expect_cpu(config: SchedulerConfig) -> None:
    """Raises _NotForCpu when the configuration asks for something else, or this machine has something better."""
    for key in ("dtype", "kv_dtype"):
        if (asked := getattr(config, key)) != "auto":
            raise _NotForCpu(f"{key} {asked} was asked for")
    if config.device not in ("auto", "cpu"):
        raise _NotForCpu(f"device {config.device} was asked for")
    if config.device == "auto" and _has_cuda():
        raise _NotForCpu("there is a GPU")


def _has_cuda() -> bool:
    """Asks PyTorch only where there may be a GPU: it takes seconds to import, and 190 MB that are never given back."""
    if not any(Path(name).exists() for name in _GPU_DEVICES):
        return False
    _quiet_openmp()
    import torch

    return torch.cuda.is_available()


def _load_cpu(config: SchedulerConfig, card: ModelCard | None) -> LoadedEngine:
    # Imported here, for only this engine needs it, and a fake one must cost little.
    from kernels.cpu import LibraryMissing
    from services.scheduler.engine.cpu_engine import DRAFT_TOKENS, CpuEngineConfig, load_cpu_engine

    assert config.model is not None, "the configuration was checked"
    try:
        engine = load_cpu_engine(
            CpuEngineConfig(
                model=config.model,
                weights_format=config.weights_format,
                context_length=config.context_length,
                kv_tokens=config.kv_tokens,
                kv_memory_bytes=config.kv_memory_bytes,
                block_size=config.block_size,
                threads=config.threads,
                draft_tokens=DRAFT_TOKENS if config.draft_tokens is None else config.draft_tokens,
            )
        )
    except LibraryMissing as error:
        raise _NotForCpu(str(error)) from error
    return LoadedEngine(engine, card, {"engine": "cpu", **asdict(engine.report)})


def _load_torch(config: SchedulerConfig, card: ModelCard | None) -> LoadedEngine:
    _quiet_openmp()
    # Imported here, for it takes seconds and much memory, which the fake engine must not cost.
    from services.scheduler.engine.settings import TorchEngineConfig
    from services.scheduler.engine.torch_engine import load_engine

    assert config.model is not None, "the configuration was checked"
    engine = load_engine(
        TorchEngineConfig(
            model=config.model,
            device=config.device,
            dtype=config.dtype,
            kv_dtype=config.kv_dtype,
            context_length=config.context_length,
            kv_tokens=config.kv_tokens,
            kv_memory_bytes=config.kv_memory_bytes,
            block_size=config.block_size,
            threads=config.threads,
            deterministic=config.deterministic,
        )
    )
    return LoadedEngine(engine, card, {"engine": "torch", **asdict(engine.report)})


def _quiet_openmp() -> None:
    """Called before torch is first imported, which is when this is read.

    OpenMP's idle threads spin by default. Four processes share the cores here: a spinning thread takes its core from
    the return path, and a step on two of them took ten times as long as on one.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


_LOADERS: Mapping[str, Callable[[SchedulerConfig, ModelCard | None], LoadedEngine]] = {
    "auto": _load_best,
    "cpu": _load_cpu,
    "torch": _load_torch,
    "fake": _load_fake,
}


def _warm_up(engine: Engine) -> None:
    """Computes two tokens, so that the first caller pays for no lazy start, and a broken engine never becomes ready."""
    key, spec = SequenceKey(0), SamplingSpec(seed=0, temperature=0.0)
    engine.open(key, spec, (0,), ())
    try:
        for position in (0, 1):
            answers = engine.step([Slice(key, (0,), position, (0,), True, position, False)])
            for answer in answers:
                if isinstance(answer, Failed):
                    raise RuntimeError(f"the engine can't compute a token: {answer.message}")
    finally:
        engine.close(key)
