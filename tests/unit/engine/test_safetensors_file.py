"""Safetensors read without the package: the same numbers, and no file believed that contradicts itself."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from services.scheduler.model.array_weights import as_fp32
from services.scheduler.model.errors import UnsupportedModelError
from services.scheduler.model.safetensors_file import stored_arrays


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_numbers_are_those_that_were_saved(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {"odd": torch.randn(3, 5), "one": torch.randn(1), "none": torch.empty(0, 4), "large": torch.randn(40, 7)}
    save_file(
        {name: tensor.to(dtype) for name, tensor in tensors.items()}, tmp_path / "a.safetensors", {"format": "pt"}
    )
    arrays = stored_arrays(tmp_path / "a.safetensors")
    assert arrays.keys() == tensors.keys()
    for name, tensor in tensors.items():
        array = arrays[name]()
        assert array.dtype == (np.uint16 if dtype is torch.bfloat16 else np.float32)
        np.testing.assert_array_equal(as_fp32(array), tensor.to(dtype).float().numpy())


def test_a_tensor_at_an_odd_address_is_read(tmp_path: Path) -> None:
    path = _written(tmp_path, {"a": _entry("F32", [2], 0, 8)}, np.array([1.5, -2.0], "<f4").tobytes(), padding=" " * 3)
    assert stored_arrays(path)["a"]().tolist() == [1.5, -2.0]


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2], "data_offsets": [4, 0]},
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 9]},
        {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]},
        {"dtype": "F32", "shape": "ab", "data_offsets": [0, 8]},
        {"dtype": "F32", "shape": [2]},
        "F32",
    ],
    ids=str,
)
def test_an_entry_that_cannot_be_true_is_refused_with_the_file(tmp_path: Path, entry: object) -> None:
    with pytest.raises(UnsupportedModelError, match=r"a\.safetensors can't be read as safetensors"):
        stored_arrays(_written(tmp_path, {"a": entry}, bytes(8)))


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    whole = _written(tmp_path, {"a": _entry("F32", [2], 0, 8)}, bytes(8)).read_bytes()
    for length in range(len(whole)):
        (tmp_path / "a.safetensors").write_bytes(whole[:length])
        with pytest.raises(UnsupportedModelError, match=r"a\.safetensors can't be read"):
            stored_arrays(tmp_path / "a.safetensors")


@pytest.mark.parametrize(
    ("entry", "why"),
    [
        ({"dtype": "F8_E4M3", "shape": [8], "data_offsets": [0, 8]}, "tensor 'a' is of dtype F8_E4M3"),
        ({"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}, "tensor 'a' of F32 \\(3,\\) has 8 bytes"),
    ],
)
def test_a_tensor_that_cannot_be_read_is_refused_by_name(tmp_path: Path, entry: dict[str, Any], why: str) -> None:
    read = stored_arrays(_written(tmp_path, {"a": entry}, bytes(8)))["a"]
    with pytest.raises(UnsupportedModelError, match=why):
        read()


def _entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def _written(folder: Path, header: dict[str, Any], body: bytes, padding: str = "") -> Path:
    text = (json.dumps(header) + padding).encode()
    path = folder / "a.safetensors"
    path.write_bytes(struct.pack("<Q", len(text)) + text + body)
    return path
