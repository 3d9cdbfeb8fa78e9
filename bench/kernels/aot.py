"""Compiles every Triton kernel for GPUs that needn't be there, and prints what each takes of them.

    python -m bench.kernels.aot [--arch 80,90,100] [--jobs N]

A table: registers a thread, shared memory a program, and spills, as the assembler that comes with Triton counts them
(`ptxas -v`). More than a few spills fail. What hasn't changed since the last run isn't compiled again
(build/kernels-aot.json).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import triton
from rich.console import Console
from rich.progress import track
from rich.table import Table
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas, sm_arch_from_capability
from triton.compiler import ASTSource

from bench.kernels.variants import Variant, variants

KNOWN = Path("build/kernels-aot.json")
SPILLS_MAX = 128
"""Bytes. Versions of Triton differ by some registers: 3.7, which comes with PyTorch's CUDA build, spills 72 in one
kernel where 3.9 spills none."""
_NUMBERS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Footprint:
    """Registers a thread, shared memory of a program in bytes, bytes stored and loaded because registers ran out."""

    registers: int
    shared: int
    spills: int


def main() -> int:
    """Exit code 1 when a kernel spills too much, 2 where the kernels would only be interpreted."""
    parser = argparse.ArgumentParser(prog="python -m bench.kernels.aot", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--arch", default="80,90,100", help="compute capabilities (default: 80,90,100)")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="default: one a core")
    options = parser.parse_args()
    if triton.knobs.runtime.interpret:
        print("TRITON_INTERPRET is set: nothing would be compiled. Unset it.", file=sys.stderr)
        return 2
    architectures = [int(arch) for arch in options.arch.split(",")]
    found = footprints(list(variants()), architectures, options.jobs)
    Console(width=None if sys.stdout.isatty() else 120).print(table(found, architectures))
    spilling = [f"{name} on sm_{arch}: {it.spills} bytes" for (name, arch), it in found.items() if it.spills]
    print(f"{len(found)} compiled forms, {len(spilling)} with spills" + "".join(f"\n  {line}" for line in spilling))
    return 1 if any(it.spills > SPILLS_MAX for it in found.values()) else 0


def footprints(wanted: Sequence[Variant], architectures: Sequence[int], jobs: int) -> dict[tuple[str, int], Footprint]:
    """Of each variant on each architecture that can run it; from the last run where nothing changed."""
    known = json.loads(KNOWN.read_text(encoding="utf-8")) if KNOWN.exists() else {}
    places = [(at, arch) for at, variant in enumerate(wanted) for arch in architectures if arch >= variant.since]
    keys = {place: _key(wanted[place[0]], place[1]) for place in places}
    missing = [place for place in places if keys[place] not in known]
    KNOWN.parent.mkdir(exist_ok=True)
    with ProcessPoolExecutor(max_workers=max(jobs, 1)) as pool:
        done = pool.map(_compile_at, *zip(*missing, strict=True)) if missing else ()
        for place, footprint in zip(missing, _shown(done, len(missing)), strict=True):
            known[keys[place]] = asdict(footprint)
            KNOWN.write_text(json.dumps(known, indent=1), encoding="utf-8")  # at once: a cut run isn't lost
    fresh = {key: known[key] for key in keys.values()}
    KNOWN.write_text(json.dumps(fresh, indent=1), encoding="utf-8")
    return {(wanted[at].name, arch): Footprint(**known[keys[at, arch]]) for at, arch in places}


def _shown(done: Iterable[Footprint], total: int) -> Iterable[Footprint]:
    return track(done, "compiling", total=total, disable=not total or not sys.stderr.isatty())


def _key(variant: Variant, arch: int) -> str:
    """Changes whenever the kernel, whatever it calls, its form or the compiler does."""
    form = repr((triton.__version__, arch, variant.signature, dict(variant.constants), variant.warps, variant.stages))
    return hashlib.sha256((variant.kernel.cache_key + form + repr(sorted(variant.whole))).encode()).hexdigest()


def _compile_at(at: int, arch: int) -> Footprint:
    """In a process of its own, which finds the variant again by its place: kernels don't travel."""
    return footprint_of(list(variants())[at], arch)


def footprint_of(variant: Variant, arch: int) -> Footprint:
    """Compiles one variant for one architecture; raises where that isn't possible."""
    signature = variant.signature
    aligned = [
        place for place, (name, kind) in enumerate(signature.items()) if kind.startswith("*") or name in variant.whole
    ]
    constants = {(list(signature).index(name),): value for name, value in variant.constants.items()}
    source = ASTSource(
        fn=variant.kernel,
        signature=signature,
        constexprs=constants,
        attrs={(place,): [["tt.divisibility", 16]] for place in aligned},
    )
    options = {"num_warps": variant.warps, "num_stages": variant.stages, "enable_fp_fusion": True}
    compiled = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
    return _assembled(str(compiled.asm["ptx"]), arch, int(compiled.metadata.shared))


def _assembled(ptx: str, arch: int, shared: int) -> Footprint:
    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [get_ptxas(arch).path, "-v", f"--gpu-name={sm_arch_from_capability(arch)}", file.name]
        told = subprocess.run([*command, "-o", os.devnull], capture_output=True, text=True, check=False)
    numbers = _NUMBERS.search(told.stderr)
    if told.returncode or numbers is None:
        raise RuntimeError(f"ptxas: {told.stderr}")
    stores, loads, registers = map(int, numbers.groups())
    return Footprint(registers, shared, stores + loads)


def table(found: dict[tuple[str, int], Footprint], architectures: Sequence[int]) -> Table:
    """A row a variant; registers, shared memory in KiB and spills in bytes for each architecture."""
    shown = Table("kernel", box=None)
    for arch in architectures:
        for title in (f"sm_{arch} reg", "KiB", "spill"):
            shown.add_column(title, justify="right")
    for name in dict.fromkeys(name for name, _ in found):
        cells = [found.get((name, arch)) for arch in architectures]
        numbers = [(str(it.registers), f"{it.shared / 1024:.1f}", str(it.spills)) if it else ("–",) * 3 for it in cells]
        shown.add_row(name, *(number for cell in numbers for number in cell))
    return shown


if __name__ == "__main__":
    sys.exit(main())
