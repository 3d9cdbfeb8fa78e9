"""Weights that had 4 bits are known by their values, whatever they are stored as."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.integration.model.small_models import load_small_cpu_engine, save_small_model
from tests.step_library import needs_step_library

pytestmark = needs_step_library
LAST = "model.layers.1.mlp.down_proj.weight"
UNEVEN = torch.tensor([-4.0, -3.0, -2.2, -1.6, -1.1, -0.7, -0.4, -0.1, 0.0, 0.1, 0.4, 0.8, 1.2, 1.7, 2.5, 4.0])


def evenly(weight: torch.Tensor, group: int = 32) -> torch.Tensor:
    """16 evenly spaced values from the least to the largest of each group of inputs."""
    groups = weight.view(len(weight), -1, group)
    least, most = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
    step = (most - least) / 15
    return (((groups - least) / step).round() * step + least).view_as(weight)


def unevenly(weight: torch.Tensor) -> torch.Tensor:
    """The nearest of 16 values that aren't evenly spaced, as formats for normally distributed weights have them."""
    nearest = (weight.unsqueeze(-1) / weight.abs().max() * 4 - UNEVEN).abs().argmin(-1)
    return UNEVEN[nearest] * weight.abs().max() / 4


def chosen(folder: Path, change: Callable[[str, torch.Tensor], torch.Tensor]) -> str:
    """The format that the engine takes of its own accord for a small model whose matrices were changed."""
    save_small_model(folder, hidden_size=64, intermediate_size=128)
    path = folder / "model.safetensors"
    weights = {name: change(name, w) if w.dim() == 2 else w for name, w in load_file(path).items()}
    save_file(weights, path, metadata={"format": "pt"})
    return load_small_cpu_engine(folder, weights_format="auto").report.weights_format


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        pytest.param(lambda name, w: w, "int8", id="random weights"),
        pytest.param(lambda name, w: w.bfloat16(), "int8", id="random weights in bf16"),
        pytest.param(lambda name, w: evenly(w), "int4", id="4 bits"),
        pytest.param(lambda name, w: evenly(w).bfloat16(), "int4", id="4 bits, stored as bf16"),
        pytest.param(lambda name, w: evenly(w, 64), "int4", id="4 bits, larger groups"),
        pytest.param(lambda name, w: unevenly(w), "int8", id="16 values at uneven distances"),
        pytest.param(lambda name, w: w if name == LAST else evenly(w), "int8", id="4 bits but for one matrix"),
    ],
)
def test_weights_that_had_4_bits_keep_4_and_others_take_8(
    tmp_path: Path, change: Callable[[str, torch.Tensor], torch.Tensor], expected: str
) -> None:
    assert chosen(tmp_path, change) == expected
