"""A whole step of a model in one call, for CPUs: packed weights, exact integer arithmetic, its own threads; in C++.

`build` compiles `src/` (`make kernels`), `library` finds and loads what came out, `model` is what an engine uses.
The operations inside are judged by the PyTorch references of the folders beside this one.
"""

from __future__ import annotations

from kernels.cpu.library import (
    HEAD_DIM_MAX,
    Activation,
    Bf16Array,
    FloatArray,
    Format,
    LibraryMissing,
    Rope,
    Shape,
    best_kernels,
    block_bytes,
    load_library,
)
from kernels.cpu.model import Batch, CpuModel, Part, StepResult

__all__ = [
    "HEAD_DIM_MAX",
    "Activation",
    "Batch",
    "Bf16Array",
    "CpuModel",
    "FloatArray",
    "Format",
    "LibraryMissing",
    "Part",
    "Rope",
    "Shape",
    "StepResult",
    "best_kernels",
    "block_bytes",
    "load_library",
]
