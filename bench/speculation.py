"""What speculation brings on a CPU, by kind of text: the same requests through one engine with it and one without.

    python -m bench.speculation [--texts 8] [--rounds 3] [--tokens 120]

Both engines run under the scheduler's real core, and take turns in going first. Their ids must be the same. Shown
are the ratios of decoding time, wall and CPU, of the sums over all texts, and how many of the guesses were right.
Written to build/bench/speculation.json.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from tokenizers import Tokenizer

from bench.machine import machine
from bench.serving.prompts import Prompts
from cli.model_source import model_directory
from services.scheduler.admission import Limits
from services.scheduler.config import SchedulerConfig
from services.scheduler.core import SchedulerCore
from services.scheduler.engine.api import Engine, SamplingSpec
from services.scheduler.engines import load
from services.scheduler.execution import Execution
from services.scheduler.submission import ChoiceStart, Route, Submission

OUT = Path("build/bench/speculation.json")
ROUTE = Route("bench", 1)
STREAMS, TEMPERATURES = (1, 8), (0.0, 0.8)
QUESTIONS = (
    "What is the capital of France, and what is it known for?",
    "Write a short story about a mill by a river.",
    "How does a refrigerator work?",
    "Give me three tips for learning to cook.",
    "Write a Python function that adds two numbers, and a test for it.",
    "List ten fruits with their colours.",
    "Explain photosynthesis to a child.",
    "Write an email in which I ask for a day off.",
)


@dataclass(slots=True)
class Spent:
    """Decoding seconds of one engine, and what its guesses came to."""

    wall_s: float = 0.0
    cpu_s: float = 0.0
    drafted: int = 0
    accepted: int = 0


@dataclass(slots=True)
class Row:
    """One kind of text, at one temperature, with so many streams at once."""

    kind: str
    temperature: float
    streams: int
    without: Spent = field(default_factory=Spent)
    drafting: Spent = field(default_factory=Spent)

    def __str__(self) -> str:
        plain, drafting = self.without, self.drafting
        ratios = f"wall × {plain.wall_s / drafting.wall_s:.2f}   CPU × {plain.cpu_s / drafting.cpu_s:.2f}"
        right = f"{drafting.accepted} of {drafting.drafted}"
        return f"{self.kind:>10} {self.temperature:>4} {self.streams:>2} streams   {ratios}   right: {right}"


class Texts:
    """Prompts of each kind, as ids."""

    def __init__(self, model: Path, count: int) -> None:
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        prompts = Prompts(model, seed=1)
        said = [QUESTIONS[number % len(QUESTIONS)] for number in range(count)]
        long = [prompts.prose(400) for _ in range(count)]
        self.kinds = {
            "words": [self._ids(prompts.text(128)) for _ in range(count)],
            "prose": [self._ids(prompts.prose(128)) for _ in range(count)],
            "questions": [self._ids(_asked(each)) for each in said],
            "summaries": [self._ids(_asked(f"Summarise this text:\n{each}")) for each in long],
        }

    def _ids(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)


def _asked(text: str) -> str:
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def decode(engine: Engine, spent: Spent, prompts: Sequence[tuple[int, ...]], temperature: float, tokens: int) -> object:
    """Answers all prompts at once, and counts the steps in which nobody is prefilled; returns the ids."""
    core, execution = SchedulerCore(engine.info, Limits(prefix_cache=False)), Execution(engine)
    for number, prompt in enumerate(prompts, 1):
        sampling = SamplingSpec(seed=number, temperature=temperature, top_p=0.95)
        core.submit(
            Submission(
                attempt_id=number,
                route=ROUTE,
                prompt_ids=prompt,
                choices=(ChoiceStart(0),),
                sampling=sampling,
                max_tokens=tokens,
                ignore_eos=True,
            ),
            0.0,
        )
    while core.has_work:
        plan = core.plan()
        wall, cpu = time.perf_counter(), time.process_time()
        answers = execution.run(plan)
        if not plan.prefills:
            spent.wall_s += time.perf_counter() - wall
            spent.cpu_s += time.process_time() - cpu
        core.apply(plan, answers, 0.0)
        spent.drafted += plan.drafted
        spent.accepted += plan.accepted
    return [list(attempt.sequences[0].log.ids) for attempt in core.attempts.values()]


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a line per kind of text; fails when any id differs."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.speculation", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--texts", type=int, default=8, help="of each kind (8)")
    parser.add_argument("--rounds", type=int, default=3, help="how often all of it is run (3)")
    parser.add_argument("--tokens", type=int, default=120, help="length of each answer (120)")
    options = parser.parse_args(argv)
    described, model = machine(), model_directory(None)
    plain, drafting = (load(SchedulerConfig(engine="cpu", model=model, draft_tokens=n)).engine for n in (0, None))
    rows = []
    for kind, prompts in Texts(model, options.texts).kinds.items():
        for temperature in TEMPERATURES:
            for streams in STREAMS:
                row = Row(kind, temperature, streams)
                turns = [(plain, row.without), (drafting, row.drafting)]
                for at in range(0, len(prompts) * options.rounds, streams):
                    asked = [prompts[number % len(prompts)] for number in range(at, at + streams)]
                    first, second = (decode(*turn, asked, temperature, options.tokens) for turn in turns)
                    if first != second:
                        raise SystemExit(f"{row.kind}: the ids differ")
                    turns.reverse()
                print(row, flush=True)
                rows.append(row)
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps({"machine": described, "rows": [asdict(row) for row in rows]}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
