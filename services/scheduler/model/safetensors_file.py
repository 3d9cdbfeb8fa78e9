"""The safetensors format read into numpy: a length, a JSON header of that length, and the tensors, one after the other.

Described in the format's own documentation (github.com/huggingface/safetensors). The package's reader knows no bf16
without PyTorch.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from services.scheduler.model.errors import UnsupportedModelError

_LENGTH = struct.Struct("<Q")
_DTYPES = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}
_HEADER_BYTES_MAX = 100_000_000  # the format's own limit


def stored_arrays(path: Path) -> dict[str, Callable[[], Any]]:
    """By name, what reads each tensor: the bits of bf16 if it is stored so, otherwise fp32.

    Raises UnsupportedModelError for a file that breaks the format, and on reading a tensor of another dtype.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            (length,) = _LENGTH.unpack(file.read(_LENGTH.size))
            if length > min(size, _HEADER_BYTES_MAX):
                raise ValueError(f"its header would be {length} bytes long")
            header = json.loads(file.read(length))
        start = _LENGTH.size + length
        entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
        return {name: partial(_read, path, name, *_place(entry, start, size)) for name, entry in entries.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise UnsupportedModelError(f"{path} can't be read as safetensors: {error!r}") from error


def _place(entry: dict[str, Any], start: int, size: int) -> tuple[str, tuple[int, ...], int, int]:
    """Dtype, shape, first byte and number of bytes; raises what `stored_arrays` catches."""
    begin, end = (int(offset) for offset in entry["data_offsets"])
    if not 0 <= begin <= end <= size - start:
        raise ValueError(f"bytes {begin} to {end} are beyond its end")
    return entry["dtype"], tuple(int(one) for one in entry["shape"]), start + begin, end - begin


def _read(path: Path, name: str, dtype: str, shape: tuple[int, ...], offset: int, size: int) -> Any:
    """Maps the file anew, so that its pages leave this process with the array, not with the last of all arrays."""
    if dtype not in _DTYPES:
        raise UnsupportedModelError(f"tensor {name!r} is of dtype {dtype}; {', '.join(_DTYPES)} can be read")
    stored = np.dtype(_DTYPES[dtype])
    if math.prod(shape) * stored.itemsize != size:
        raise UnsupportedModelError(f"{path}: tensor {name!r} of {dtype} {shape} has {size} bytes")
    mapped = np.memmap(path, dtype=np.uint8, mode="r", offset=offset, shape=(size,)) if size else np.empty(0, np.uint8)
    array = np.asarray(mapped).view(stored).reshape(shape)
    return array if dtype == "BF16" else array.astype(np.float32, copy=False)
