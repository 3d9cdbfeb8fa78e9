"""What `deterministic` costs: a prefill and decode steps with it and without, on one engine after the other.

    PYTHONPATH=.:build/gen python -m bench.deterministic_cost --model build/model/smollm2-135m-instruct

Both engines are loaded at once and take turns, so that what else runs on the machine hits both alike.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from services.scheduler.engine.api import Engine, SamplingSpec, SequenceKey, Slice
from services.scheduler.engine.settings import TorchEngineConfig
from services.scheduler.engine.torch_engine import load_engine

BLOCK = 16
PREFILL = 512
CACHED = 64


def decode(engine: Engine, streams: int) -> None:
    """One step of so many sequences, at position CACHED each."""
    blocks = CACHED // BLOCK + 1
    engine.step(
        [
            Slice(SequenceKey(n), (n + 5,), CACHED, range(n * blocks, (n + 1) * blocks), True, 1, False)
            for n in range(streams)
        ]
    )


def prefill(engine: Engine, tokens: int) -> None:
    """A prompt from its beginning."""
    ids = [10 + n % 1000 for n in range(tokens)]
    engine.step([Slice(SequenceKey(0), ids, 0, range(-(-tokens // BLOCK)), True, 0, False)])


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    engines = [
        load_engine(TorchEngineConfig(model=arguments.model, kv_tokens=8192, dtype="fp32", deterministic=on))
        for on in (False, True)
    ]
    for engine in engines:
        for number in range(32):
            engine.open(SequenceKey(number), SamplingSpec(seed=number), (1,), ())
    print("ms per step, median; PyTorch, fp32")
    for name, work in (
        ("decode, 1 stream", lambda engine: decode(engine, 1)),
        ("decode, 8 streams", lambda engine: decode(engine, 8)),
        ("decode, 32 streams", lambda engine: decode(engine, 32)),
        (f"prefill of {PREFILL}", lambda engine: prefill(engine, PREFILL)),
    ):
        plain, fixed = _medians(engines, work, arguments.rounds)
        print(f"{name:20} {plain:8.1f}   deterministic {fixed:8.1f}   × {fixed / plain:.2f}")


def _medians(engines: Sequence[Engine], work: Callable[[Engine], None], rounds: int) -> list[float]:
    times: list[list[float]] = [[] for _ in engines]
    for _ in range(rounds + 1):
        for engine, spent in zip(engines, times, strict=True):
            started_at = time.perf_counter()
            work(engine)
            spent.append(time.perf_counter() - started_at)
    return [statistics.median(spent[1:]) * 1e3 for spent in times]


if __name__ == "__main__":
    main()
