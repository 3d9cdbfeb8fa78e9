"""What a token costs in the detokenizer: a token batch in, a text batch out, without sockets.

    python -m bench.detokenizer_path [--streams 256] [--steps 400] [--tokenizer FILE ...]

Prints CPU microseconds per token, with one token per stream and step: for the core alone (decoding, stops, columns) and
with the messages on both sides (parse, build, serialise). Then the odd cases, at two sizes: their time must grow as
their size does.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tokenizers import Tokenizer

from bench.machine import machine
from services.detokenizer.batch import SequenceStart
from services.detokenizer.core import Core
from services.detokenizer.plan import TextPlan
from services.detokenizer.wire import read_batch, write_batch
from services.text.vocabulary import Vocabulary, load_vocabulary
from tailrace.v1 import scheduler_pb2

ROOT = Path(__file__).resolve().parent.parent
TOKENIZERS = (
    ROOT / "build/model/smollm2-135m-instruct/tokenizer.json",
    ROOT / "build/tokenizers/llama3/tokenizer.json",
    ROOT / "build/tokenizers/llama2/tokenizer.json",
)
# `min_tokens` lets the stops be looked for without ever ending a stream.
PLANS = {
    "no stops": TextPlan(),
    "3 stops": TextPlan(stop=("\n\n\n", "User:", "###!"), min_tokens=1 << 30),
    "token info": TextPlan(token_info=True),
}
REPEATS = 5


def main() -> None:
    """Reads the command line, measures, prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--tokenizer", type=Path, nargs="*", default=[path for path in TOKENIZERS if path.exists()])
    arguments = parser.parse_args()
    print(machine())
    for path in arguments.tokenizer:
        vocabulary = load_vocabulary(path)
        text = "".join(sorted((path.read_text("utf-8") for path in (ROOT / "docs").glob("*.md")), key=len))
        ids = Tokenizer.from_file(str(path)).encode(text, add_special_tokens=False).ids
        print(f"\n{path.parent.name}  ({len(vocabulary.pieces)} ids, {arguments.streams} streams)")
        for name, plan in PLANS.items():
            steps = list(_steps(ids, arguments.streams, arguments.steps))
            core = min(_core_us(vocabulary, plan, steps) for _ in range(REPEATS))
            wire = min(_wire_us(vocabulary, plan, steps) for _ in range(REPEATS))
            print(f"  {name:<11} core {core:5.2f} µs a token   with messages {wire:5.2f} µs a token")
        _print_odd_cases(vocabulary)


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


def _print_odd_cases(vocabulary: Vocabulary) -> None:
    plain = sorted(vocabulary.plain)
    by_text = {vocabulary.plain[token_id]: token_id for token_id in plain}
    lone = next(token_id for token_id, piece in enumerate(vocabulary.pieces) if piece == b"\xe4")
    special = min(vocabulary.special)
    a, b = by_text["a"], by_text["b"]
    many = TextPlan(stop=tuple("a" * length + "b" for length in range(1, 1024, 16)), min_tokens=1 << 30)
    hidden = TextPlan(stop=(vocabulary.pieces[special].decode() + "x",), min_tokens=1 << 30)
    for name, plan, ids in (
        ("bytes that form no character", TextPlan(), [lone]),
        ("a, under 64 stops of a…ab", many, [a]),
        ("a…ab, under the same stops", many, [*[a] * 1000, b]),
        ("hidden special tokens that begin a stop", hidden, [special]),
    ):
        small, large = (_one_stream_us(vocabulary, plan, ids, count) for count in (10_000, 100_000))
        print(f"  {name:<41} {small:5.2f} µs a token at 10,000   {large:5.2f} at 100,000")


def _one_stream_us(vocabulary: Vocabulary, plan: TextPlan, pattern: Sequence[int], count: int) -> float:
    core = _started(vocabulary, plan, 1)

    def run() -> None:
        for step in range(count):
            core.column((0,), (step,), (pattern[step % len(pattern)],))
            core.take()

    return _cpu_us(run) / count


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


if __name__ == "__main__":
    main()
