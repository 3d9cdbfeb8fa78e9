"""Compiles the step library with the C++ compiler that is there: `python -m kernels.cpu.build [--out FOLDER]`.

Each instruction set is a source file of its own with its own flags. One that the compiler doesn't know is left out.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from kernels.cpu.library import BUILD_FOLDER, FILE_NAME

SOURCES = Path(__file__).resolve().parent / "src"
FLAGS = ("-std=c++17", "-O3", "-fPIC", "-Wall", "-Wextra", "-Wno-psabi")
_AVX512 = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mavx512vnni", "-mfma")
_X86_SETS: Mapping[str, Sequence[str]] = {
    "avx2": ("-mavx2", "-mfma"),
    # GCC takes its own intrinsics' undefined registers for uninitialised variables.
    "avx512": (*_AVX512, "-Wno-uninitialized", "-Wno-maybe-uninitialized"),
}


class BuildError(Exception):
    """The library can't be compiled; the message is the compiler's."""


def find_compiler() -> str | None:
    """$CXX, or the first C++ compiler on the path."""
    named = os.environ.get("CXX")
    return next((path for name in (named, "g++", "clang++", "c++") if name and (path := shutil.which(name))), None)


def build(compiler: str, out: Path) -> list[str]:
    """Writes the library to the folder `out`; returns the instruction sets in it. Raises BuildError."""
    sets = _X86_SETS if platform.machine().lower() in ("x86_64", "amd64") else {}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = Path(folder)
        optional = {
            name: pool.submit(_compile, compiler, f"kernels_{name}", flags, objects) for name, flags in sets.items()
        }
        left_out = {"detect", *(f"kernels_{name}" for name in _X86_SETS)}
        plain = [path.stem for path in SOURCES.glob("*.cpp") if path.stem not in left_out]
        always = [pool.submit(_compile, compiler, name, (), objects) for name in plain]
        compiled = [name for name, job in optional.items() if job.exception() is None]
        for job in always:
            job.result()
        _compile(compiler, "detect", [f"-DTAILRACE_{name.upper()}" for name in compiled], objects)
        out.mkdir(parents=True, exist_ok=True)
        made = objects / FILE_NAME
        _run([compiler, "-shared", "-o", str(made), *map(str, objects.glob("*.o")), "-lpthread"])
        # In one move: a process that has the old one loaded keeps it.
        shutil.move(made, out / f"{FILE_NAME}.new")
        (out / f"{FILE_NAME}.new").replace(out / FILE_NAME)
    return [*compiled, "generic"]


def _compile(compiler: str, name: str, flags: Sequence[str], out: Path) -> None:
    _run([compiler, *FLAGS, *flags, "-c", str(SOURCES / f"{name}.cpp"), "-o", str(out / f"{name}.o")])


def _run(command: Sequence[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError(f"{' '.join(command)}\n{done.stderr}")


def main() -> int:
    """Without a compiler that works it says so and succeeds, unless it is told that the library is needed."""
    parser = argparse.ArgumentParser(prog="python -m kernels.cpu.build", description="Compiles the CPU's step library.")
    parser.add_argument("--out", type=Path, default=BUILD_FOLDER, help="folder of the library (default: build/kernels)")
    parser.add_argument("--required", action="store_true", help="fail where it can't be compiled")
    options = parser.parse_args()
    compiler = find_compiler()
    if compiler is None:
        print("no C++ compiler (g++, clang++): models will run on plain PyTorch, several times slower", file=sys.stderr)
        return 1 if options.required else 0
    try:
        sets = build(compiler, options.out)
    except BuildError as error:
        print(f"the CPU's step library can't be compiled; models will run on plain PyTorch:\n{error}", file=sys.stderr)
        return 1 if options.required else 0
    print(f"{options.out / FILE_NAME}: {', '.join(sets)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
