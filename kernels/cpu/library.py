"""The compiled library: where it lies, and its C functions with their types."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

FILE_NAME = "tailrace_cpu.so"
HEAD_DIM_MAX = 256
_HERE = Path(__file__).resolve().parent
BUILD_FOLDER = _HERE.parents[1] / "build" / "kernels"
_PLACES = (_HERE, BUILD_FOLDER)  # an installed package; a checkout after `make kernels`

FloatArray = np.ndarray[Any, np.dtype[np.float32]]
Bf16Array = np.ndarray[Any, np.dtype[np.uint16]]
"""bf16 by its bits, which numpy has no type for."""
IntArray = np.ndarray[Any, np.dtype[np.int32]]
Pointer = ctypes.c_void_p


class LibraryMissing(Exception):
    """The step library isn't there, or can't be loaded; the message says why and what would help."""


class Format(IntEnum):
    """How weights, or keys and values, are stored; what is summed is fp32 or exact integers in each.

    FP32: exactly. BF16: rounded to that, and multiplied by fp32 inputs. INT8: weights as 8 bits with a scale per 32 and
    16-bit inputs, keys and values with a scale per token and head. INT4: weights as 4 bits with a scale and a least
    value per 32, the head as INT8.
    """

    FP32 = 0
    INT8 = 1
    BF16 = 2
    INT4 = 3

    @property
    def kv(self) -> Format:
        """How keys and values are stored beside such weights: FP32 and INT8 are all there is for them."""
        return Format.INT8 if self in (Format.INT8, Format.INT4) else Format.FP32


class Activation(IntEnum):
    """What the gate of the feed-forward layer goes through."""

    SILU = 0
    GELU_TANH = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """One way of turning: `frequencies` (head_dim / 2,) are angles per position, `gain` stretches cosine and sine."""

    frequencies: FloatArray
    gain: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """What the library must know of a model: sizes as in its configuration, the cache in blocks of `block_size` tokens.

    Layer n turns by `ropes[layer_ropes[n]]`, and a row of it sees `layer_windows[n]` positions, its own included, or
    all for 0. Soft caps of 0 are none.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    weights_format: Format
    kv_format: Format
    blocks: int
    block_size: int
    norm_eps: float
    attention_scale: float
    ropes: Sequence[Rope]
    layer_ropes: Sequence[int]
    layer_windows: Sequence[int]
    embedding_scale: float = 1.0
    attention_soft_cap: float = 0.0
    logit_soft_cap: float = 0.0
    activation: Activation = Activation.SILU
    qkv_bias: bool = False
    attention_out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    sandwich_norms: bool = False

    @property
    def layers(self) -> int:
        """How many there are."""
        return len(self.layer_ropes)


_INTEGERS = (
    *("vocab_size", "hidden_size", "intermediate_size", "layers", "heads", "kv_heads", "head_dim"),
    *("weights_format", "kv_format", "blocks", "block_size"),
    *("qkv_bias", "attention_out_bias", "mlp_bias", "qk_norm", "sandwich_norms", "activation"),
)
_FLOATS = ("norm_eps", "attention_scale", "embedding_scale", "attention_soft_cap", "logit_soft_cap")


class CShape(ctypes.Structure):
    """tailrace_shape."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in (*_INTEGERS, "ropes")),
        *((name, ctypes.c_float) for name in _FLOATS),
        *((name, Pointer) for name in ("rope_frequencies", "rope_gains", "layer_ropes", "layer_windows")),
    )


class CBatch(ctypes.Structure):
    """tailrace_batch."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("rows", "sequences", "wanted")),
        *((name, Pointer) for name in ("tokens", "row_starts", "first_positions", "table_starts", "block_tables")),
        *((name, Pointer) for name in ("wanted_rows", "logits", "best_tokens", "best_logits")),
    )


class CAttentionSizes(ctypes.Structure):
    """tailrace_attention_sizes."""

    _fields_ = (
        *(
            (name, ctypes.c_int32)
            for name in ("known", "rows", "heads", "kv_heads", "head_dim", "block_size", "window")
        ),
        *((name, ctypes.c_float) for name in ("scale", "soft_cap")),
    )


def open_engine(shape: Shape, kernels: str, threads: int) -> Pointer:
    """A new engine; raises LibraryMissing, ValueError for a shape that can't be computed, MemoryError."""
    library = load_library()
    if any(rope.frequencies.shape != (shape.head_dim // 2,) for rope in shape.ropes):
        raise ValueError(f"a rope must have {shape.head_dim // 2} frequencies, half of head_dim")
    if len(shape.layer_windows) != shape.layers:
        raise ValueError(f"{shape.layers} layers, but {len(shape.layer_windows)} windows")
    arrays = {
        "rope_frequencies": np.array([rope.frequencies for rope in shape.ropes], dtype=np.float32),
        "rope_gains": np.array([rope.gain for rope in shape.ropes], dtype=np.float32),
        "layer_ropes": np.array(shape.layer_ropes, dtype=np.int32),
        "layer_windows": np.array(shape.layer_windows, dtype=np.int32),
    }
    c_shape = CShape(
        ropes=len(shape.ropes),
        **{name: int(getattr(shape, name)) for name in _INTEGERS},
        **{name: getattr(shape, name) for name in _FLOATS},
        **{name: array.ctypes.data for name, array in arrays.items()},
    )
    engine = library.tailrace_open(ctypes.byref(c_shape), kernels.encode(), threads)
    if not engine:
        raise_last_error()
    return Pointer(engine)


def block_bytes(
    kv_format: Format, *, layers: int, kv_heads: int, head_dim: int, block_size: int, kernels: str = ""
) -> int:
    """What one block of the cache takes, all layers together."""
    page = int(load_library().tailrace_page_bytes(kernels.encode(), kv_format, block_size, head_dim))
    if page < 0:
        raise_last_error()
    return layers * kv_heads * page


def best_kernels() -> str:
    """The fastest instruction set that is both compiled and here; raises LibraryMissing."""
    return str(load_library().tailrace_best_kernels().decode())


def library_path() -> Path | None:
    """Where the compiled library lies, if anywhere."""
    return next((place / FILE_NAME for place in _PLACES if (place / FILE_NAME).exists()), None)


@cache
def load_library() -> ctypes.CDLL:
    """Loads the library and declares its functions; raises LibraryMissing."""
    path = library_path()
    if path is None:
        raise LibraryMissing("the CPU step library isn't compiled: `make kernels` does it, and needs g++ or clang++")
    try:
        library = ctypes.CDLL(str(path))
    except OSError as error:
        raise LibraryMissing(f"{path} can't be loaded: {error}") from error
    for name, (result, arguments) in _FUNCTIONS.items():
        function = getattr(library, f"tailrace_{name}")
        function.restype, function.argtypes = result, arguments
    return library


_INT, _LONG, _TEXT = ctypes.c_int, ctypes.c_int64, ctypes.c_char_p
_FUNCTIONS: dict[str, tuple[Any, list[Any]]] = {
    "last_error": (_TEXT, []),
    "best_kernels": (_TEXT, []),
    "has": (_INT, [_TEXT]),
    "open": (Pointer, [ctypes.POINTER(CShape), _TEXT, _INT]),
    "close": (None, [Pointer]),
    "put": (_INT, [Pointer, _INT, _INT, Pointer, _INT, _LONG]),
    "weight_bytes": (_LONG, [Pointer]),
    "page_bytes": (_LONG, [_TEXT, _INT, _INT, _INT]),
    "logits_stride": (ctypes.c_int32, [Pointer]),
    "step": (_INT, [Pointer, ctypes.POINTER(CBatch)]),
    "product": (_INT, [_TEXT, _INT, Pointer, _INT, Pointer, _INT, _INT, Pointer, _INT]),
    "rms_norm": (_INT, [_TEXT, Pointer, Pointer, ctypes.c_float, _INT, _INT, Pointer]),
    "gate": (_INT, [_TEXT, _INT, Pointer, Pointer, _INT, Pointer]),
    "largest": (_INT, [_TEXT, Pointer, _INT, Pointer, Pointer]),
    "attention": (_INT, [_TEXT, _INT, ctypes.POINTER(CAttentionSizes), Pointer, Pointer, Pointer, Pointer]),
}


def check(result: int) -> None:
    """Raises what a call left behind, if it failed."""
    if result:
        raise_last_error()


def raise_last_error() -> NoReturn:
    """MemoryError or ValueError, with the library's message."""
    message = load_library().tailrace_last_error().decode()
    raise MemoryError(message) if message == "out of memory" else ValueError(message)
