"""Texts that people wrote, at hand without a download: some of this repository's own."""

from __future__ import annotations

from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
_NAMES = (
    "README.md",
    "docs/text.md",
    "docs/decisions/0001-contracts.md",
    "docs/inputs.md",
    "services/protocol/parse.py",
)


def own_texts() -> list[str]:
    """Prose with tables, and a module of Python."""
    return [(_ROOT / name).read_text(encoding="utf-8") for name in _NAMES]
