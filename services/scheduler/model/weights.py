"""A model folder's weights, each tensor read when it is asked for: from safetensors, or out of a GGUF file."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from services.runtime.log import get_logger
from services.scheduler.model.errors import UnsupportedModelError

REPORT_INTERVAL_S = 5.0

_log = get_logger("scheduler")

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
GGUF = "model.gguf"
"""In a folder made from a GGUF file: that file, or a link to it."""

_UNUSED_SUFFIX = ".rotary_emb.inv_freq"  # old exports keep this table; it follows from the configuration

Sources = Mapping[str, Callable[[], torch.Tensor]]
"""Each tensor by Hugging Face's name, and what reads it."""


class Weights:
    """The tensors of an open model folder; `take` gives one, `finish` complains of what nobody took."""

    def __init__(
        self, sources: Sources, dtype: torch.dtype, device: torch.device, kept: torch.dtype | None = None
    ) -> None:
        self._sources = sources
        self._dtype = dtype
        self._device = device
        self._kept = kept
        self._taken: set[str] = set()
        self._reported = time.monotonic()
        self.values_taken = 0

    def __contains__(self, name: str) -> bool:
        return name in self._sources

    def take(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The tensor under `name` on the engine's device, in its dtype or in `dtype`; raises UnsupportedModelError."""
        if name not in self._sources:
            raise UnsupportedModelError(f"the weights have no tensor {name!r}")
        tensor = self._sources[name]()
        if tensor.shape != shape:
            raise UnsupportedModelError(f"tensor {name!r} is {tuple(tensor.shape)}; the configuration says {shape}")
        self._taken.add(name)
        self.values_taken += tensor.numel()
        self._report()
        usual = tensor.dtype if tensor.dtype is self._kept else self._dtype
        return tensor.to(device=self._device, dtype=dtype or usual)

    def _report(self) -> None:
        """One line now and then, so that nobody takes a long load for a standstill."""
        now = time.monotonic()
        if now - self._reported >= REPORT_INTERVAL_S:
            self._reported = now
            _log.info("loading weights", tensors=len(self._taken), of=len(self._sources))

    def skip(self, name: str) -> None:
        """Says that a tensor isn't needed although it may be there."""
        self._taken.add(name)

    def finish(self) -> None:
        """Raises UnsupportedModelError if a tensor was left: the model has parts that would be silently missing."""
        left = [name for name in self._sources if name not in self._taken and not name.endswith(_UNUSED_SUFFIX)]
        if left:
            raise UnsupportedModelError(
                f"the weights hold {len(left)} tensors that the configuration doesn't tell of: {left[0]!r}, …"
            )


@contextmanager
def open_weights(
    folder: Path, dtype: torch.dtype, device: torch.device, *, kept: torch.dtype | None = None
) -> Iterator[Weights]:
    """Opens `model.safetensors`, the shards of its index, or `model.gguf`; raises UnsupportedModelError.

    Tensors are given in `dtype`, but those that are stored in the dtype `kept` stay as they are.
    """
    yield Weights(_sources(folder), dtype, device, kept)


def _sources(folder: Path) -> Sources:
    if (folder / GGUF).exists():
        # Imported here: most folders have no such file.
        from services.scheduler.model.gguf_file import GgufFile
        from services.scheduler.model.gguf_model import GgufModel

        return GgufModel(GgufFile(folder / GGUF)).tensors()
    sources: dict[str, Callable[[], torch.Tensor]] = {}
    for path in _files(folder):
        sources |= {name: partial(_read, path, name) for name in _names(path)}
    return sources


def _files(folder: Path) -> list[Path]:
    if (folder / _SINGLE).exists():
        return [folder / _SINGLE]
    index = folder / _INDEX
    if not index.exists():
        raise UnsupportedModelError(f"{folder} has neither {_SINGLE} nor {_INDEX} nor {GGUF}")
    return [folder / name for name in sorted(set(_weight_map(index).values()))]


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UnsupportedModelError(f"{index} can't be read: {error!r}") from error
    return dict(weight_map)


def _names(path: Path) -> list[str]:
    try:
        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    except (OSError, SafetensorError) as error:
        raise UnsupportedModelError(f"{path} can't be read: {error}") from error


def _read(path: Path, name: str) -> torch.Tensor:
    """Maps the file anew, so that its pages leave this process with the tensor, not with the last of all tensors."""
    with safe_open(path, framework="pt") as file:
        tensor: torch.Tensor = file.get_tensor(name)
    return tensor
