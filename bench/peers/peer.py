"""What a peer is: how it gets here, how it is started, what it calls the model."""

from __future__ import annotations

import os
import subprocess
import sys
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from rich.console import Console


class CantBeHad(Exception):
    """This machine can't have it; the message says why."""


class Peer(Protocol):
    """A server with an OpenAI-compatible HTTP API, whose `/health` answers 200 once it serves."""

    name: str
    weights: str
    weight_bits: float | None
    """Of one weight as it is stored, its share of the scales included; None where that isn't known."""
    model: str
    """Its name in requests."""
    plain_schema: bool = False
    """Whether its completions take a JSON schema as `json_schema` and overlook `response_format`."""

    @abstractmethod
    def install(self, root: Path, console: Console) -> None:
        """Puts it into a folder of its own below `root`, once. Raises CantBeHad."""

    @abstractmethod
    def command(self, root: Path, port: int) -> Sequence[str]:
        """What starts it."""

    def environment(self, root: Path) -> Mapping[str, str]:
        """What it needs beside ours."""
        return {}


def environment_of(directory: Path, packages: Sequence[str], console: Console) -> Path:
    """The Python of a virtual environment with these packages, made once. Raises CantBeHad."""
    python = directory / "bin" / "python"
    stamp = directory / f".has-{'-'.join(packages).replace('/', '_')}"
    if stamp.exists():
        return python
    console.print(f"installing {' '.join(packages)} into {directory}", highlight=False)
    run([sys.executable, "-m", "venv", str(directory)], f"{directory.name} needs a virtual environment")
    run([str(python), "-m", "pip", "install", "--quiet", *packages], f"{directory.name} can't be installed")
    stamp.touch()
    return python


def run(command: Sequence[str], why: str, extra: Mapping[str, str] | None = None) -> None:
    """Runs a step of an installation. Raises CantBeHad with the last lines that it said."""
    done = subprocess.run(command, check=False, capture_output=True, text=True, env={**os.environ, **(extra or {})})
    if done.returncode != 0:
        raise CantBeHad(f"{why}: {(done.stderr or done.stdout).strip()[-600:]}")
