"""The GGUF format: metadata, and tensors that stay in the mapped file until one is dequantised.

The format is described in ggml's documentation (docs/gguf.md). The `gguf` package's own reader makes several arrays of
each of a vocabulary's strings, which for 262,144 of them takes ten times as long as the rest of a start; so the header
is read here, and the package dequantises.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

from services.scheduler.model.errors import UnsupportedModelError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9

FloatArray = np.ndarray[Any, np.dtype[np.float32]]

_SLICE_VALUES = 1 << 22  # dequantised at once: what is made on the way takes several times their bytes


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor, still packed: `shape` as PyTorch counts, `data` bytes of the mapped file, row after row."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    data: np.ndarray

    @property
    def values(self) -> int:
        """How many numbers it holds."""
        return math.prod(self.shape)

    def dequantised(self) -> FloatArray:
        """The values in fp32, a slice at a time, so that no second whole copy is made; raises UnsupportedModelError."""
        block, size = GGML_QUANT_SIZES[self.kind]
        columns = self.shape[-1]
        packed = self.data.reshape(-1, columns // block * size)
        out = np.empty((packed.shape[0], columns), dtype=np.float32)
        rows = max(_SLICE_VALUES // columns, 1)
        try:
            for first in range(0, len(packed), rows):
                out[first : first + rows] = dequantize(packed[first : first + rows], self.kind)
        except NotImplementedError as error:
            raise UnsupportedModelError(f"tensor {self.name!r} is of type {self.kind.name}: {error}") from error
        return out.reshape(self.shape)


class GgufFile:
    """An open file: `tensors` by name, and metadata by `get`; a file of another format raises UnsupportedModelError."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                header = _Header(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
            self._metadata, self.tensors = header.read()
        except (OSError, ValueError, struct.error) as error:
            raise UnsupportedModelError(f"{path} can't be read as GGUF: {error}") from error

    def get(self, key: str, default: Any = None) -> Any:
        """The metadata value under `key` as a Python value, or `default`."""
        return self._metadata.get(key, default)

    def require(self, key: str) -> Any:
        """The metadata value under `key`; a file without it raises UnsupportedModelError."""
        value = self.get(key)
        if value is None:
            raise UnsupportedModelError(f"{self.path.name} has no {key}")
        return value


@dataclass(frozen=True, slots=True)
class _Description:
    """What the header says of a tensor; `offset` counts from where the tensors begin."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int

    def placed(self, file: memoryview, start: int) -> GgufTensor:
        block, size = GGML_QUANT_SIZES[self.kind]
        length = math.prod(self.shape) // block * size
        data = file[start + self.offset : start + self.offset + length]
        if len(data) != length:
            raise ValueError(f"it ends within the tensor {self.name!r}")
        return GgufTensor(self.name, self.shape, self.kind, np.frombuffer(data, dtype=np.uint8))


class _Header:
    """Reads from the front of a mapped file; what doesn't fit in it raises ValueError or struct.error."""

    def __init__(self, data: mmap.mmap) -> None:
        self._bytes = memoryview(data)
        self._at = 0

    def read(self) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
        if bytes(self._bytes[:4]) != _MAGIC:
            raise ValueError("it doesn't begin with 'GGUF'")
        self._at = 4
        version = self._scalar("I")
        if version not in _VERSIONS:
            raise ValueError(f"its version is {version}; {' and '.join(map(str, _VERSIONS))} are known")
        tensor_count, entries = self._scalar("Q"), self._scalar("Q")
        metadata = {self._string(): self._value(self._scalar("I")) for _ in range(entries)}
        descriptions = [self._description() for _ in range(tensor_count)]
        alignment = int(metadata.get("general.alignment", 32))
        start = -(-self._at // alignment) * alignment
        return metadata, {tensor.name: tensor.placed(self._bytes, start) for tensor in descriptions}

    def _description(self) -> _Description:
        name, dimensions = self._string(), self._scalar("I")
        shape = tuple(reversed([self._scalar("Q") for _ in range(dimensions)]))  # it names the fastest first
        return _Description(name, shape, GGMLQuantizationType(self._scalar("I")), self._scalar("Q"))

    def _scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self._bytes, self._at)
        self._at += struct.calcsize(f"<{code}")
        return value

    def _string(self) -> str:
        length = self._scalar("Q")
        text = self._bytes[self._at : self._at + length]
        if len(text) != length:
            raise ValueError("it ends within a string")
        self._at += length
        return str(text, "utf-8")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            return self._array(self._scalar("I"), self._scalar("Q"))
        if kind not in _SCALARS:
            raise ValueError(f"a metadata value is of the unknown type {kind}")
        return self._scalar(_SCALARS[kind])

    def _array(self, kind: int, length: int) -> list[Any]:
        if kind in _SCALARS:
            values = struct.unpack_from(f"<{length}{_SCALARS[kind]}", self._bytes, self._at)
            self._at += struct.calcsize(f"<{length}{_SCALARS[kind]}")
            return list(values)
        return self._strings(length) if kind == _STRING else [self._value(kind) for _ in range(length)]

    def _strings(self, count: int) -> list[str]:
        """A vocabulary and its merges are half a million of them, so this loop is kept tight."""
        at, data, length_at = self._at, self._bytes, struct.Struct("<Q").unpack_from
        strings = []
        for _ in range(count):
            (length,) = length_at(data, at)
            strings.append(str(data[at + 8 : at + 8 + length], "utf-8"))
            at += 8 + length
        if at > len(data):
            raise ValueError("it ends within a string")
        self._at = at
        return strings
