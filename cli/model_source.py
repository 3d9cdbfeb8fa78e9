"""Where the model comes from: a directory as it is, a GGUF file exported into the cache, or the embedded one."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

EMBEDDED = "smollm2-135m-instruct"
NEEDED_FILES = ("config.json", "tokenizer.json")
_BUILT = Path(__file__).resolve().parent.parent / "build" / "model" / EMBEDDED


class NoModel(Exception):
    """The model can't be used; the message says what is wrong with it."""


def model_directory(given: Path | None) -> Path:
    """The directory that all services load. Raises NoModel. An export writes its progress to standard error."""
    if given is None:
        return _BUILT if (_BUILT / "config.json").exists() else _exported(None, _cache() / EMBEDDED)
    if given.is_dir():
        return _checked(given)
    if not given.exists():
        raise NoModel(f"there is no {given}")
    if given.suffix != ".gguf":
        raise NoModel(f"{given} is neither a directory nor a .gguf file")
    # The model's name in requests is its directory's, so what tells equal names apart stands above it.
    return _exported(given, _cache() / hashlib.sha256(bytes(given.resolve())).hexdigest()[:8] / given.stem)


def _checked(directory: Path) -> Path:
    missing = [name for name in NEEDED_FILES if not (directory / name).exists()]
    if missing:
        raise NoModel(f"{directory} is not a model directory: it has no {' and no '.join(missing)}")
    return directory


def _exported(gguf: Path | None, out: Path) -> Path:
    """Runs the export in a process of its own, which leaves `out` alone while it is up to date."""
    # Somebody's own file is only linked to: written out as fp32 it would take up to eight times its size.
    source = ["--gguf", str(gguf), "--weights", "link"] if gguf else []
    command = [sys.executable, "-m", "services.scheduler.model.export", "--out", str(out), *source]
    if subprocess.run(command, check=False).returncode != 0:
        raise NoModel(f"{gguf or 'the embedded model'} can't be exported; the line above says why")
    return out


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tailrace" / "models"
