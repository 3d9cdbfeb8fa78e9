"""Weights from safetensors, one file or numbered shards with an index, each tensor read when it is asked for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from services.scheduler.model.errors import UnsupportedModelError

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_UNUSED_SUFFIX = ".rotary_emb.inv_freq"  # old exports keep this table; it follows from the configuration


class Weights:
    """The tensors of an open model folder; `take` gives one, `finish` complains of what nobody took."""

    def __init__(self, files: dict[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        self._files = files
        self._dtype = dtype
        self._device = device
        self._taken: set[str] = set()
        self.values_taken = 0

    def __contains__(self, name: str) -> bool:
        return name in self._files

    def take(self, name: str, *shape: int, dtype: torch.dtype | None = None) -> torch.Tensor:
        """The tensor under `name` in the engine's dtype or in `dtype`, on its device; raises UnsupportedModelError."""
        if name not in self._files:
            raise UnsupportedModelError(f"the weights have no tensor {name!r}")
        tensor: torch.Tensor = self._files[name].get_tensor(name)
        if tensor.shape != shape:
            raise UnsupportedModelError(f"tensor {name!r} is {tuple(tensor.shape)}; the configuration says {shape}")
        self._taken.add(name)
        self.values_taken += tensor.numel()
        return tensor.to(device=self._device, dtype=dtype or self._dtype)

    def skip(self, name: str) -> None:
        """Says that a tensor isn't needed although it may be there."""
        self._taken.add(name)

    def finish(self) -> None:
        """Raises UnsupportedModelError if a tensor was left: the model has parts that would be silently missing."""
        left = [name for name in self._files if name not in self._taken and not name.endswith(_UNUSED_SUFFIX)]
        if left:
            raise UnsupportedModelError(
                f"the weights hold {len(left)} tensors that the configuration doesn't tell of: {left[0]!r}, …"
            )


@contextmanager
def open_weights(folder: Path, dtype: torch.dtype, device: torch.device) -> Iterator[Weights]:
    """Opens `model.safetensors` or the shards of its index; raises UnsupportedModelError."""
    with ExitStack() as stack:
        files: dict[str, Any] = {}
        for path in _files(folder):
            file = _opened(stack, path)
            files |= dict.fromkeys(file.keys(), file)
        yield Weights(files, dtype, device)


def _files(folder: Path) -> list[Path]:
    if (folder / _SINGLE).exists():
        return [folder / _SINGLE]
    index = folder / _INDEX
    if not index.exists():
        raise UnsupportedModelError(f"{folder} has neither {_SINGLE} nor {_INDEX}")
    return [folder / name for name in sorted(set(_weight_map(index).values()))]


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UnsupportedModelError(f"{index} can't be read: {error!r}") from error
    return dict(weight_map)


def _opened(stack: ExitStack, path: Path) -> Any:
    try:
        return stack.enter_context(safe_open(path, framework="pt"))
    except (OSError, SafetensorError) as error:
        raise UnsupportedModelError(f"{path} can't be read: {error}") from error
