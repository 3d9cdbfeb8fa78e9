"""Which implementation of the model's operations a device gets."""

from __future__ import annotations

import importlib.util
import os

import torch

from kernels.deterministic import deterministic_ops
from kernels.ops import Ops, reference_ops


def choose_ops(device: torch.device, *, deterministic: bool = False) -> Ops:
    """Our Triton kernels on a GPU where the package triton is there to compile them, otherwise plain PyTorch.

    With `deterministic`, plain PyTorch in a fixed order. Under TRITON_INTERPRET kernels would be interpreted, which is
    for tests that ask for them.
    """
    if deterministic:
        return deterministic_ops(reference_ops())
    interpreted = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")
    if device.type != "cuda" or interpreted or importlib.util.find_spec("triton") is None:
        return reference_ops()
    from kernels.triton_ops import triton_ops

    return triton_ops()
