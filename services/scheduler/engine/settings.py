"""What a Torch engine is told at its start, and what it works out from that: device, dtype, sizes."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from kernels.ops import Ops
from services.scheduler.engine.cache_size import CacheSettings, blocks_within, cpu_blocks
from services.scheduler.model.config import Described
from services.scheduler.model.kv_cache import token_bytes

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
KV_DTYPES = {"fp8": torch.float8_e4m3fn}

_FP8_CAPABILITY = (8, 9)  # Ada and Hopper: the first that convert to it and back

_GPU_SHARE = 0.85  # of what is free once the weights are loaded; the rest is for activations


@dataclass(frozen=True, kw_only=True)
class TorchEngineConfig(CacheSettings):
    """`device` is "auto", "cpu" or "cuda[:n]"; `dtype` "auto", "fp32", "bf16" or "fp16".

    "auto" is bf16 on a GPU, and fp32 on a CPU: without 16-bit arithmetic, which few have, bf16 is far slower there, and
    the rounding of 16 bits lets an answer depend on what else is in the batch. `kv_dtype` is "auto", which keeps keys
    and values in the same, or "fp8" (e4m3), which takes half of 16 bits' memory and needs our kernels.
    `threads` is PyTorch's own choice when None. `deterministic`: a row's result never depends on what else is computed.
    """

    model: Path
    device: str = "auto"
    dtype: str = "auto"
    kv_dtype: str = "auto"
    threads: int | None = None
    deterministic: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.threads is not None and self.threads < 1:
            raise ValueError(f"threads is {self.threads}; it must be at least 1")
        if self.dtype not in ("auto", *DTYPES):
            raise ValueError(f"dtype is {self.dtype!r}; it must be auto, {', '.join(DTYPES)}")
        if self.kv_dtype not in ("auto", *KV_DTYPES):
            raise ValueError(f"kv_dtype is {self.kv_dtype!r}; it must be auto or {', '.join(KV_DTYPES)}")


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


def choose_kv_dtype(name: str, dtype: torch.dtype, device: torch.device, ops: Ops) -> torch.dtype:
    """The dtype to keep keys and values in; raises ValueError where a narrow one can't be read or written."""
    if name == "auto":
        return dtype
    if not ops.narrow_cache:
        raise ValueError(f"kv_dtype {name} needs a CUDA device and Triton's kernels; operations here are {ops.name}'s")
    if device.type == "cuda" and (found := torch.cuda.get_device_capability(device)) < _FP8_CAPABILITY:
        raise ValueError(
            f"kv_dtype {name} needs a GPU from sm_89 on (Ada, Hopper); this one is sm_{found[0]}{found[1]}"
        )
    return KV_DTYPES[name]


def choose_blocks(config: TorchEngineConfig, model: Described, dtype: torch.dtype, device: torch.device) -> int:
    """How many KV blocks to hold; raises ValueError if that is none."""
    block_bytes = token_bytes(model, dtype) * config.block_size
    if device.type == "cpu":
        return cpu_blocks(config, model, block_bytes)
    if config.kv_memory_bytes is not None:
        return blocks_within(config, config.kv_memory_bytes, block_bytes)
    return blocks_within(config, int(torch.cuda.mem_get_info(device)[0] * _GPU_SHARE), block_bytes)
