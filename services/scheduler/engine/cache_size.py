"""How far an engine looks back, and how many KV blocks it holds: what is asked for, or what the memory allows."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from services.scheduler.model.config import Described
from services.scheduler.model.errors import UnsupportedModelError

_CPU_SHARE = 1 / 8  # of the memory this process may use
_CONTEXTS_MAX = 4  # by default no more than so many full contexts, on the CPU


@dataclass(frozen=True, kw_only=True)
class CacheSettings:
    """`context_length` (tokens) may only shorten the model's own.

    The KV cache is sized by `kv_tokens` or by `kv_memory_bytes`; with neither it takes a share of the memory.
    """

    context_length: int | None = None
    kv_tokens: int | None = None
    kv_memory_bytes: int | None = None
    block_size: int = 16

    def __post_init__(self) -> None:
        if self.kv_tokens is not None and self.kv_memory_bytes is not None:
            raise ValueError("kv_tokens and kv_memory_bytes can't both be set")
        for name in ("context_length", "kv_tokens", "kv_memory_bytes", "block_size"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"{name} is {value}; it must be at least 1")


def choose_context(asked: int | None, model: Described) -> int:
    """The context length to serve, tokens; raises UnsupportedModelError when the model can't see so far."""
    if asked is not None and asked > model.context_length:
        raise UnsupportedModelError(f"context_length {asked} is beyond the model's own {model.context_length}")
    return asked or model.context_length


def cpu_blocks(settings: CacheSettings, model: Described, block_bytes: int) -> int:
    """How many blocks to hold in main memory; raises ValueError if that is none."""
    if settings.kv_tokens is not None or settings.kv_memory_bytes is not None:
        return blocks_within(settings, settings.kv_memory_bytes or 0, block_bytes)
    contexts = _CONTEXTS_MAX * choose_context(settings.context_length, model) // settings.block_size
    share = blocks_within(settings, int(_memory_limit_bytes() * _CPU_SHARE), block_bytes)
    return min(share, max(contexts, 1))


def blocks_within(settings: CacheSettings, memory_bytes: int, block_bytes: int) -> int:
    """As many blocks as `kv_tokens` fill or, without it, as fit the memory; raises ValueError if that is none."""
    size = settings.block_size
    blocks = memory_bytes // block_bytes if settings.kv_tokens is None else settings.kv_tokens // size
    if blocks < 1:
        tokens = memory_bytes * size // block_bytes if settings.kv_tokens is None else settings.kv_tokens
        raise ValueError(f"the KV cache would hold {tokens} tokens, less than one block of {size}")
    return blocks


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
