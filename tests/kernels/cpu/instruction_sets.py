"""The instruction sets that the step library was compiled for and this CPU has; none without the library."""

from __future__ import annotations

from kernels.cpu import load_library
from tests.step_library import MISSING

NAMES = ("generic", "generic_wide", "avx2", "avx512")
SETS = [] if MISSING else [name for name in NAMES if load_library().tailrace_has(name.encode())]
