"""Where kernels run in these tests, and what their random inputs come from."""

from __future__ import annotations

import os
import secrets

import pytest
import torch


@pytest.fixture(scope="session")
def device() -> torch.device:
    """The CPU under Triton's interpreter; a GPU where `make test-gpu` switched that off."""
    return torch.device("cpu" if os.environ["TRITON_INTERPRET"] == "1" else "cuda")


@pytest.fixture(autouse=True)
def _fresh_inputs() -> None:
    """Each run draws numbers of its own, but for CI's, which judges a change and not the draw.

    A failed test shows its seed, and KERNEL_SEED=… draws the same again.
    """
    seed = int(os.environ.get("KERNEL_SEED") or (0 if os.environ.get("CI") else secrets.randbits(31)))
    print(f"KERNEL_SEED={seed}")
    torch.manual_seed(seed)
