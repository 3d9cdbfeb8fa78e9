"""Prints what pyproject.toml asks for, one requirement a line, so that an image can install it before it has the code.

python deploy/requirements.py [EXTRA ...]     the project's own, and the named extras'
python deploy/requirements.py --build         what generates the contract and builds the package
"""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path


def requirements(pyproject: Path, extras: list[str]) -> list[str]:
    """The project's requirements and those of `extras`; `["--build"]` asks for the build's instead."""
    content = tomllib.loads(pyproject.read_text())
    optional = content["project"]["optional-dependencies"]
    if extras == ["--build"]:
        generator = [line for line in optional["dev"] if line.startswith("grpcio-tools")]
        return [*content["build-system"]["requires"], *generator]
    return [*content["project"]["dependencies"], *(line for extra in extras for line in optional[extra])]


if __name__ == "__main__":
    print(*requirements(Path("pyproject.toml"), sys.argv[1:]), sep="\n")
