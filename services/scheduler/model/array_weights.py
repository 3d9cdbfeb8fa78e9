"""A model folder's weights as arrays of numpy: what an engine reads that has no other use for PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from kernels.cpu import Bf16Array, FloatArray
from services.scheduler.model.safetensors_file import stored_arrays
from services.scheduler.model.weights import GGUF, Sources, Weights, safetensors_files

Array = FloatArray | Bf16Array


@contextmanager
def open_arrays(folder: Path) -> Iterator[Weights[Array]]:
    """Opens `model.safetensors`, the shards of its index, or `model.gguf`; raises UnsupportedModelError.

    Arrays are the bits of bf16 where they are stored so, otherwise fp32.
    """
    yield Weights(_sources(folder), lambda array, fp32: as_fp32(array) if fp32 else array)


def as_fp32(array: Array) -> FloatArray:
    """bf16 is the upper half of fp32."""
    return (array.astype(np.uint32) << 16).view(np.float32) if array.dtype == np.uint16 else array.view(np.float32)


def _sources(folder: Path) -> Sources[Array]:
    if (folder / GGUF).exists():
        # Imported here: most folders have no such file.
        from services.scheduler.model.gguf_file import GgufFile
        from services.scheduler.model.gguf_model import GgufModel

        return GgufModel(GgufFile(folder / GGUF)).arrays()
    sources: dict[str, Callable[[], Array]] = {}
    for path in safetensors_files(folder):
        sources |= stored_arrays(path)
    return sources
