"""What the step library does where there is no memory, and with blocks that are too long."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from kernels.cpu import CpuModel, Format, Rope, Shape
from tests.conftest import ROOT
from tests.step_library import needs_step_library

pytestmark = needs_step_library

SHAPE = Shape(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=8192,
    heads=1,
    kv_heads=1,
    head_dim=64,
    weights_format=Format.INT8,
    kv_format=Format.INT8,
    blocks=256,
    block_size=16,
    norm_eps=1e-5,
    attention_scale=0.125,
    ropes=[Rope(frequencies=np.ones(32, dtype=np.float32))],
    layer_ropes=[0],
    layer_windows=[0],
)

SCARCE = """
import resource
from kernels.cpu import Batch, CpuModel
from tests.kernels.cpu.test_memory import SHAPE

model = CpuModel(SHAPE, threads=1)

def step(rows):
    model.step(Batch([[1] * rows], [0], [range(256)], [1]))

step(4)
with open("/proc/self/statm") as file:
    used = int(file.read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (16 << 20),) * 2)
for rows, fits in ((4000, False), (40, True), (4000, False), (4, True)):
    try:
        step(rows)
    except MemoryError:
        assert not fits
    else:
        assert fits
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a process is told there how much memory it may map")
def test_a_step_for_which_there_is_no_memory_fails_and_smaller_ones_go_on() -> None:
    done = subprocess.run([sys.executable, "-c", SCARCE], capture_output=True, text=True, check=False, cwd=ROOT)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_block_longer_than_what_its_sums_hold_is_refused() -> None:
    CpuModel(replace(SHAPE, block_size=512), threads=1)
    with pytest.raises(ValueError, match="block_size is 513; it must be 1 to 512"):
        CpuModel(replace(SHAPE, block_size=513), threads=1)
