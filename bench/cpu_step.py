"""What a step costs on this CPU, by engine and weights format: decodes at several batch sizes and contexts, prefills.

    python -m bench.cpu_step [--rounds 5] [--engines int8,int4,bf16,fp32,torch]

Engines take turns within a round, so that what else the machine does falls on all of them; each figure is the median
over rounds, and the ratio is that of the medians. Beside wall time stands the CPU time of all threads, which other
processes on the same cores distort less. Written to build/bench/cpu-step.json.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from bench.machine import machine
from cli.model_source import model_directory
from services.scheduler.config import SchedulerConfig, WeightsFormatName
from services.scheduler.engine.api import Engine, SamplingSpec, SequenceKey, Slice
from services.scheduler.engines import load

OUT = Path("build/bench/cpu-step.json")
BATCHES, CONTEXTS, PREFILLS = (1, 8, 32), (256, 1024), (128, 1024)
CHUNK = 512
BLOCKS = 32 * (1024 // 16 + 2)


@dataclass(frozen=True, slots=True)
class Case:
    """A decode of `batch` sequences at position `tokens`, or (batch 0) a prefill of `tokens`."""

    batch: int
    tokens: int

    @property
    def name(self) -> str:
        """As printed."""
        return f"decode {self.batch} at {self.tokens}" if self.batch else f"prefill {self.tokens}"

    @property
    def computed(self) -> int:
        """Tokens that it computes."""
        return self.batch or self.tokens


@dataclass(slots=True)
class Figures:
    """Milliseconds per case, one of each round."""

    wall_ms: list[float] = field(default_factory=list)
    cpu_ms: list[float] = field(default_factory=list)

    def median(self) -> tuple[float, float]:
        """Wall and CPU time."""
        return statistics.median(self.wall_ms), statistics.median(self.cpu_ms)


CASES = [Case(batch, context) for context in CONTEXTS for batch in BATCHES] + [Case(0, size) for size in PREFILLS]


def load_engine(name: str, model: Path) -> Engine:
    """`torch`, or the step library with that weights format."""
    sizes = {"model": model, "kv_tokens": BLOCKS * 16, "device": "cpu"}
    if name == "torch":
        return load(SchedulerConfig(engine="torch", **sizes)).engine  # type: ignore[arg-type]  # sizes are typed above
    chosen: WeightsFormatName = name  # type: ignore[assignment]  # checked by the configuration
    return load(SchedulerConfig(engine="cpu", weights_format=chosen, **sizes)).engine  # type: ignore[arg-type]


def steps(case: Case) -> list[list[Slice]]:
    """The steps of a case; blocks of a sequence lie a stride apart, as in a pool that has been used."""
    if case.batch:
        return [[_slice(number, 1, case.tokens) for number in range(case.batch)]]
    return [[_slice(0, min(CHUNK, case.tokens - at), at)] for at in range(0, case.tokens, CHUNK)]


def _slice(number: int, tokens: int, start: int) -> Slice:
    table = range(number, BLOCKS, 32)
    ids = [17 + (number * 7919 + place * 31) % 40_000 for place in range(start, start + tokens)]
    return Slice(SequenceKey(number), ids, start, table, True, 0, False)


def measure(engine: Engine, case: Case, figures: Figures) -> None:
    """Runs a case once and notes what it took."""
    planned = steps(case)
    wall, cpu = time.perf_counter(), time.process_time()
    for slices in planned:
        engine.step(slices)
    figures.wall_ms.append((time.perf_counter() - wall) * 1e3)
    figures.cpu_ms.append((time.process_time() - cpu) * 1e3)


def run(engines: dict[str, Engine], rounds: int) -> dict[str, dict[str, Figures]]:
    """Figures by case and engine; the first round warms up and isn't counted."""
    found = {case.name: {name: Figures() for name in engines} for case in CASES}
    for number in range(-1, rounds):
        for case in CASES:
            for name, engine in engines.items():
                measure(engine, case, found[case.name][name] if number >= 0 else Figures())
        print(f"\rround {number + 1} of {rounds}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return found


def table(found: dict[str, dict[str, Figures]], baseline: str) -> str:
    """One line per case and engine."""
    lines = [f"{'case':>18} {'engine':>7} {'ms':>9} {'CPU ms':>9} {'tok/s':>9}   × {baseline} (wall, CPU)"]
    for case in CASES:
        base_wall, base_cpu = found[case.name][baseline].median()
        for name, figures in found[case.name].items():
            wall, cpu = figures.median()
            ratios = f"{base_wall / wall:8.2f} {base_cpu / cpu:8.2f}"
            lines.append(
                f"{case.name:>18} {name:>7} {wall:9.2f} {cpu:9.2f} {case.computed / wall * 1e3:9.0f}   {ratios}"
            )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the table and writes the figures."""
    parser = argparse.ArgumentParser(prog="python -m bench.cpu_step", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="measured rounds (default: 5)")
    parser.add_argument("--engines", default="int8,int4,bf16,fp32,torch", help="by comma; the last is the baseline")
    options = parser.parse_args(argv)
    described = machine()
    names, model = options.engines.split(","), model_directory(None)
    engines = {name: load_engine(name, model) for name in names}
    for engine in engines.values():
        for number in range(32):
            engine.open(SequenceKey(number), SamplingSpec(seed=0, temperature=0.0), (1,), ())
    found = run(engines, options.rounds)
    print(table(found, names[-1]))
    OUT.parent.mkdir(parents=True, exist_ok=True)
    figures = {case: {name: asdict(each) for name, each in rows.items()} for case, rows in found.items()}
    OUT.write_text(json.dumps({"machine": described, "rounds": options.rounds, "cases": figures}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
