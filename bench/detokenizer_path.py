"""What a token costs in the detokenizer: a token batch in, a text batch out, without sockets, on one core.

    python -m bench.detokenizer_path [--streams 256] [--steps 200] [--tokenizer FILE ...]

Prints CPU microseconds per token, with one token per stream and step: for the core alone (decoding, stops, columns) and
with the messages on both sides (parse, build, serialise). Then odd texts at two sizes: their time must grow as their
size does, and their memory not at all. All of it is written to build/bench/detokenizer-path.json as well.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from bench.machine import machine
from bench.odd_texts import NEVER, OddText, cpu_us, odd_texts, peak_bytes
from services.detokenizer.batch import SequenceStart
from services.detokenizer.core import Core
from services.detokenizer.plan import TextPlan
from services.detokenizer.wire import read_batch, write_batch
from services.text.vocabulary import Vocabulary, load_vocabulary
from tailrace.v1 import scheduler_pb2

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "build/bench/detokenizer-path.json"
TOKENIZERS = (
    ROOT / "build/model/smollm2-135m-instruct/tokenizer.json",
    ROOT / "build/tokenizers/llama3/tokenizer.json",
    ROOT / "build/tokenizers/llama2/tokenizer.json",
)
PLANS = {
    "no stops": TextPlan(),
    "3 stops": TextPlan(stop=("\n\n\n", "User:", "###!"), min_tokens=NEVER),
    "token info": TextPlan(token_info=True),
}
REPEATS = 5
MEMORY_SIZES = (1_000, 10_000)


def main() -> int:
    """Reads the command line, measures, prints, writes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--tokenizer", type=Path, nargs="*", default=[path for path in TOKENIZERS if path.exists()])
    arguments = parser.parse_args()
    before = machine()
    print(before)
    results = [_measured(path, arguments.streams, arguments.steps) for path in arguments.tokenizer]
    _write({"tokenizers": results, "streams": arguments.streams, "steps": arguments.steps, "machine": before})
    return 0


def _measured(path: Path, streams: int, steps: int) -> dict[str, Any]:
    """Everything about one tokenizer, printed on the way."""
    vocabulary, library = load_vocabulary(path), Tokenizer.from_file(str(path))
    print(f"\n{path.parent.name}  ({len(vocabulary.pieces)} ids, {streams} streams)")
    text = "".join(sorted((path.read_text("utf-8") for path in (ROOT / "docs").glob("*.md")), key=len))
    columns = list(_steps(_encode(library, text), streams, steps))
    odd = odd_texts(vocabulary, lambda text: _encode(library, text))
    return {
        "tokenizer": path.parent.name,
        "cpu_us_per_token": {name: _plan_row(vocabulary, name, plan, columns) for name, plan in PLANS.items()},
        "odd_texts": [_odd_row(vocabulary, case) for case in odd],
    }


def _encode(library: Tokenizer, text: str) -> list[int]:
    ids: list[int] = library.encode(text, add_special_tokens=False).ids
    return ids


def _plan_row(vocabulary: Vocabulary, name: str, plan: TextPlan, steps: Sequence[Sequence[int]]) -> dict[str, float]:
    core = min(_core_us(vocabulary, plan, steps) for _ in range(REPEATS))
    wire = min(_wire_us(vocabulary, plan, steps) for _ in range(REPEATS))
    print(f"  {name:<11} core {core:5.2f} µs a token   with messages {wire:5.2f} µs a token")
    return {"core": round(core, 2), "with_messages": round(wire, 2)}


def _odd_row(vocabulary: Vocabulary, odd: OddText) -> dict[str, Any]:
    sizes = odd.tokens // 10, odd.tokens
    costs = [min(cpu_us(vocabulary, odd, size) for _ in range(3)) for size in sizes]
    peaks = [peak_bytes(vocabulary, odd, size) for size in MEMORY_SIZES]
    told = "   ".join(f"{cost:5.2f} µs a token at {size:>7,}" for cost, size in zip(costs, sizes, strict=True))
    memory = " → ".join(f"{peak / 1024:.0f}" for peak in peaks)
    print(f"  {odd.name:<44} {told}   memory {memory} KiB at {MEMORY_SIZES[0]:,} → {MEMORY_SIZES[1]:,}")
    return {
        "name": odd.name,
        "cpu_us_per_token": {str(size): round(cost, 2) for size, cost in zip(sizes, costs, strict=True)},
        "peak_bytes": {str(size): peak for size, peak in zip(MEMORY_SIZES, peaks, strict=True)},
    }


def _steps(ids: Sequence[int], streams: int, steps: int) -> Iterator[list[int]]:
    """Every stream goes through the text from a place of its own."""
    for step in range(steps):
        yield [ids[(stream * 997 + step) % len(ids)] for stream in range(streams)]


def _core_us(vocabulary: Vocabulary, plan: TextPlan, steps: Sequence[Sequence[int]]) -> float:
    core, streams = _started(vocabulary, plan, len(steps[0])), len(steps[0])
    columns = [(range(streams), [step] * streams, ids) for step, ids in enumerate(steps)]

    def run() -> None:
        for column in columns:
            core.column(*column)
            core.take()

    return _cpu_us(run) / streams / len(steps)


def _wire_us(vocabulary: Vocabulary, plan: TextPlan, steps: Sequence[Sequence[int]]) -> float:
    core, streams = _started(vocabulary, plan, len(steps[0])), len(steps[0])
    messages = [
        scheduler_pb2.TokenBatch(
            sequences=range(streams), token_offsets=[step] * streams, token_ids=ids
        ).SerializeToString()
        for step, ids in enumerate(steps)
    ]

    def run() -> None:
        for message in messages:
            read_batch(scheduler_pb2.TokenBatch.FromString(message), core)
            batch = core.take()
            if batch is not None:
                write_batch(batch).SerializeToString()

    return _cpu_us(run) / streams / len(steps)


def _started(vocabulary: Vocabulary, plan: TextPlan, streams: int) -> Core:
    core = Core(vocabulary)
    for stream in range(streams):
        core.start(SequenceStart(sequence=stream, attempt_id=stream, choice=0, plan=plan))
    core.take()
    return core


def _cpu_us(run: Callable[[], None]) -> float:
    gc.collect()
    start = time.process_time()
    run()
    return (time.process_time() - start) * 1e6


def _write(measured: dict[str, Any]) -> None:
    document = {
        **measured,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python -m bench.detokenizer_path", *sys.argv[1:]]),
    }
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    print(f"\nwritten to {OUT}")


if __name__ == "__main__":
    raise SystemExit(main())
