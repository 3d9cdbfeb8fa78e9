"""The CPU's step library in tests: there wherever there is a compiler, and only there."""

from __future__ import annotations

import pytest

from kernels.cpu.build import find_compiler
from kernels.cpu.library import library_path

MISSING = library_path() is None and find_compiler() is None
"""With a compiler and no library the tests fail: `make kernels` was forgotten, or it doesn't compile."""

needs_step_library = pytest.mark.skipif(MISSING, reason="no C++ compiler, so no step library")
