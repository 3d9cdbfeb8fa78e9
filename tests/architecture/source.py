"""The repository as text: which files are in it, and what a Python file imports."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PRODUCTION = ("services", "gateway", "kernels", "cli", "clients")


@cache
def tracked_files() -> tuple[Path, ...]:
    """All files that git tracks and that exist, relative to the root."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True, text=True).stdout
    return tuple(Path(name) for name in listed.split("\0") if name and (ROOT / name).is_file())


def python_files(*folders: str) -> tuple[Path, ...]:
    """The tracked Python files under the given top folders."""
    return tuple(path for path in tracked_files() if path.suffix == ".py" and path.parts[0] in folders)


def text_of(path: Path) -> str:
    return (ROOT / path).read_text(encoding="utf-8", errors="replace")


def imports_of(path: Path) -> Iterator[str]:
    """Every module that the file imports, anywhere in it, by its full name."""
    for node in ast.walk(ast.parse(text_of(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
