"""A model folder's weights as tensors of PyTorch, on a device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open

from services.scheduler.model.errors import UnsupportedModelError
from services.scheduler.model.weights import GGUF, Sources, Weights, safetensors_files

Tensor = torch.Tensor


@contextmanager
def open_weights(folder: Path, dtype: torch.dtype, device: torch.device) -> Iterator[Weights[Tensor]]:
    """Opens `model.safetensors`, the shards of its index, or `model.gguf`; raises UnsupportedModelError."""

    def converted(tensor: Tensor, fp32: bool) -> Tensor:
        return tensor.to(device=device, dtype=torch.float32 if fp32 else dtype)

    yield Weights(_sources(folder), converted)


def _sources(folder: Path) -> Sources[Tensor]:
    if (folder / GGUF).exists():
        # Imported here: most folders have no such file.
        from services.scheduler.model.gguf_file import GgufFile
        from services.scheduler.model.gguf_model import GgufModel

        arrays = GgufModel(GgufFile(folder / GGUF)).arrays()
        return {name: partial(_read_array, read) for name, read in arrays.items()}
    sources: dict[str, Callable[[], Tensor]] = {}
    for path in safetensors_files(folder):
        sources |= {name: partial(_read, path, name) for name in _names(path)}
    return sources


def _read_array(read: Callable[[], np.ndarray]) -> Tensor:
    return torch.from_numpy(read())


def _names(path: Path) -> list[str]:
    try:
        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    except (OSError, SafetensorError) as error:
        raise UnsupportedModelError(f"{path} can't be read: {error}") from error


def _read(path: Path, name: str) -> Tensor:
    """Maps the file anew, so that its pages leave this process with the tensor, not with the last of all tensors."""
    with safe_open(path, framework="pt") as file:
        tensor: Tensor = file.get_tensor(name)
    return tensor
