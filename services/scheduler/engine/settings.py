"""What a Torch engine is told at its start, and what it works out from that: device, dtype, sizes."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from services.scheduler.model.config import Described
from services.scheduler.model.errors import UnsupportedModelError
from services.scheduler.model.kv_cache import token_bytes

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

_CPU_SHARE = 1 / 8  # of the memory this process may use
_GPU_SHARE = 0.85  # of what is free once the weights are loaded; the rest is for activations
_CONTEXTS_MAX = 4  # by default no more than so many full contexts, on the CPU


@dataclass(frozen=True, kw_only=True)
class TorchEngineConfig:
    """`device` is "auto", "cpu" or "cuda[:n]"; `dtype` "auto", "fp32", "bf16" or "fp16".

    "auto" is bf16 on a GPU, and fp32 on a CPU: without 16-bit arithmetic, which few have, bf16 is far slower there, and
    the rounding of 16 bits lets an answer depend on what else is in the batch.
    `context_length` (tokens) may only shorten the model's own. The KV cache is sized by `kv_tokens` or by
    `kv_memory_bytes`; with neither it takes a share of the memory. `threads` is PyTorch's own choice when None.
    """

    model: Path
    device: str = "auto"
    dtype: str = "auto"
    context_length: int | None = None
    kv_tokens: int | None = None
    kv_memory_bytes: int | None = None
    block_size: int = 16
    threads: int | None = None

    def __post_init__(self) -> None:
        if self.kv_tokens is not None and self.kv_memory_bytes is not None:
            raise ValueError("kv_tokens and kv_memory_bytes can't both be set")
        for name in ("context_length", "kv_tokens", "kv_memory_bytes", "block_size", "threads"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")
        if self.dtype not in ("auto", *DTYPES):
            raise ValueError(f"dtype is {self.dtype!r}; it must be auto, {', '.join(DTYPES)}")


def choose_device(name: str) -> torch.device:
    """The device to compute on; raises ValueError if it isn't there."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device is {name!r}; it must be auto, cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device is {name!r}, but PyTorch finds no CUDA device here")
    return device


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype to compute in."""
    if name != "auto":
        return DTYPES[name]
    return torch.float32 if device.type == "cpu" else torch.bfloat16


def choose_context(asked: int | None, model: Described) -> int:
    """The context length to serve, tokens; raises UnsupportedModelError when the model can't see so far."""
    if asked is not None and asked > model.context_length:
        raise UnsupportedModelError(f"context_length {asked} is beyond the model's own {model.context_length}")
    return asked or model.context_length


def choose_blocks(config: TorchEngineConfig, model: Described, dtype: torch.dtype, device: torch.device) -> int:
    """How many KV blocks to hold; raises ValueError if that is none."""
    tokens = config.kv_tokens or _kv_bytes(config, device) // token_bytes(model, dtype)
    if config.kv_tokens is None and config.kv_memory_bytes is None and device.type == "cpu":
        tokens = min(tokens, _CONTEXTS_MAX * choose_context(config.context_length, model))
    blocks = tokens // config.block_size
    if blocks < 1:
        raise ValueError(f"the KV cache would hold {tokens} tokens, less than one block of {config.block_size}")
    return blocks


def _kv_bytes(config: TorchEngineConfig, device: torch.device) -> int:
    if config.kv_memory_bytes is not None:
        return config.kv_memory_bytes
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * _GPU_SHARE)
    return int(_memory_limit_bytes() * _CPU_SHARE)


def _memory_limit_bytes() -> int:
    """The machine's memory, or less where a control group (a container) says so."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            limit = Path(path).read_text(encoding="ascii").strip()
        except OSError:
            continue
        if limit.isdigit():
            return min(memory, int(limit))
    return memory
