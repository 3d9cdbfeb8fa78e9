"""What an export writes into its folder; the order and the safety of it are `export`'s business."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from services.scheduler.model.gguf_file import GgufFile
from services.scheduler.model.gguf_model import GgufModel
from services.scheduler.model.gguf_tokenizer import end_ids, tokenizer_config, tokenizer_of
from services.scheduler.model.weights import GGUF

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_SHARD_BYTES_MAX = 2**30

Weights = Iterable[tuple[str, torch.Tensor]]


def write_folder(gguf_path: Path, folder: Path, weights: str, report: Callable[[str], None]) -> None:
    """Writes tokenizer, configuration, template and weights ("fp32", "bf16", "fp16" or "link") into an empty folder.

    Raises UnsupportedModelError or OSError.
    """
    gguf = GgufFile(gguf_path)
    report("\rexporting tokenizer and configuration" + " " * 40)
    model = GgufModel(gguf)
    dtype = _DTYPES.get(weights, torch.float32)
    tokenizer_of(gguf).save(str(folder / "tokenizer.json"))
    settings = tokenizer_config(gguf)
    _write_json(folder / "tokenizer_config.json", {key: value for key, value in settings.items() if value is not None})
    if settings["chat_template"]:
        (folder / "chat_template.jinja").write_text(settings["chat_template"], encoding="utf-8")
    _write_json(folder / "config.json", {**model.config(), "dtype": str(dtype).removeprefix("torch.")})
    _write_json(folder / "generation_config.json", _generation_config(gguf))
    if weights == "link":
        (folder / GGUF).symlink_to(gguf.path.resolve())
        report("\r" + " " * 76 + "\r")
        return
    total = sum(tensor.values for tensor in gguf.tensors.values())
    tensors = ((name, torch.from_numpy(read())) for name, read in model.arrays().items())
    save_weights(_counted(tensors, total, report), folder, dtype)


def _generation_config(gguf: GgufFile) -> dict[str, Any]:
    ends = end_ids(gguf)
    config = {
        "bos_token_id": gguf.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": gguf.get("tokenizer.ggml.padding_token_id"),
    }
    return {key: value for key, value in config.items() if value is not None}


def save_weights(weights: Weights, folder: Path, dtype: torch.dtype, shard_bytes_max: int = _SHARD_BYTES_MAX) -> None:
    """Writes `model.safetensors`, or numbered shards and their index, holding one shard in memory at a time."""
    weight_map: dict[str, str] = {}
    shards = _shards(weights, dtype, shard_bytes_max)
    names = []
    for number, shard in zip(count(1), shards):
        names.append(f"model-{number:05d}.safetensors")
        save_file(shard, folder / names[-1], metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, names[-1])
    if len(names) == 1:
        os.replace(folder / names[0], folder / "model.safetensors")
    else:
        _write_json(folder / "model.safetensors.index.json", {"metadata": {}, "weight_map": weight_map})


def _shards(weights: Weights, dtype: torch.dtype, shard_bytes_max: int) -> Iterator[dict[str, torch.Tensor]]:
    shard: dict[str, torch.Tensor] = {}
    size = 0
    for name, values in weights:
        tensor = values.to(dtype)
        if shard and size + tensor.nbytes > shard_bytes_max:
            yield shard
            shard, size = {}, 0
        shard[name] = tensor
        size += tensor.nbytes
    yield shard


def _counted(weights: Weights, total: int, report: Callable[[str], None]) -> Weights:
    done = 0
    for name, values in weights:
        done += values.numel()
        report(f"\rexporting {100 * done // total:3d} % {name:<56}")
        yield name, values
    report("\r" + " " * 76 + "\r")


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
