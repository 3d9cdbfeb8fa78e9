"""Which implementation of the model's operations a device gets."""

from __future__ import annotations

import importlib.util
import os

import torch

from kernels.ops import Ops, reference_ops


def choose_ops(device: torch.device) -> Ops:
    """Our Triton kernels on a GPU where the package triton is there to compile them, otherwise plain PyTorch.

    Under TRITON_INTERPRET they would be interpreted, which is for tests that ask for them.
    """
    interpreted = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")
    if device.type != "cuda" or interpreted or importlib.util.find_spec("triton") is None:
        return reference_ops()
    from kernels.triton_ops import triton_ops

    return triton_ops()
