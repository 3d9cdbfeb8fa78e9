"""Puts loads on a running server and says what its callers get.

    python -m bench.serving                                       # ours, started for it, with the embedded model
    python -m bench.serving --url http://127.0.0.1:8080 --name m  # any server with OpenAI's /v1/completions
    python -m bench.serving --loads c8,chat --rounds 5

Prompts are made from a seed to exact lengths in tokens. Written to build/bench/serving.json and serving.svg.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from contextlib import AsyncExitStack
from pathlib import Path

from rich.console import Console

from bench.machine import machine
from bench.serving.comparison import Plan, Results, System, compare
from bench.serving.figures import Objective
from bench.serving.loads import LOADS
from bench.serving.ours import our_systems
from bench.serving.progress import Shown
from bench.serving.prompts import Prompts
from bench.serving.report import picture_of, rows_of, table_of
from bench.serving.targets import HttpTarget
from cli.model_source import model_directory

OUT = Path("build/bench/serving.json")


def main() -> int:
    """Measures, prints and writes."""
    options = _parser().parse_args()
    before = machine()
    systems, results = asyncio.run(_measure(options))
    rows = rows_of(systems, results)
    Console(width=150).print(table_of(rows))
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps({"machine": before, "rows": rows}, indent=2) + "\n")
    OUT.with_suffix(".svg").write_text(picture_of(rows))
    print(f"written to {OUT} and {OUT.with_suffix('.svg')}")
    return 0


async def _measure(options: argparse.Namespace) -> tuple[list[System], Results]:
    model = model_directory(options.model)
    objective = Objective(options.ttft_ms / 1000, options.tpot_ms / 1000)
    plan = Plan({name: LOADS[name] for name in options.loads}, options.rounds, objective, options.seed)
    async with AsyncExitStack() as stack:
        if options.url:
            target = await stack.enter_async_context(HttpTarget(options.url, options.name or model.name))
            systems = [System(options.url, "", target, ())]
        else:
            systems = await our_systems(stack, model, options.flags.split())
        with Shown(len(plan.loads) * plan.rounds * len(systems)) as shown:
            results = await compare(systems, plan, lambda seed: Prompts(model, seed), shown.run, shown.failure)
    return systems, results


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.serving", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", help="a server to measure; without it ours is started")
    parser.add_argument("--name", help="what it calls its model (default: the model directory's name)")
    parser.add_argument("--model", type=Path, help="model directory: its tokenizer makes the prompts")
    parser.add_argument("--flags", default="", help="flags for our scheduler, in one string")
    parser.add_argument("--loads", type=_loads, default=tuple(LOADS), metavar=",".join(LOADS))
    parser.add_argument("--rounds", type=int, default=3, help="how often everything is run (3)")
    parser.add_argument("--ttft-ms", type=float, default=1000.0, help="objective for goodput (1000)")
    parser.add_argument("--tpot-ms", type=float, default=100.0, help="objective for goodput (100)")
    parser.add_argument("--seed", type=int, default=1)
    return parser


def _loads(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := [name for name in names if name not in LOADS]:
        raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: must be of {', '.join(LOADS)}")
    return names


if __name__ == "__main__":
    sys.exit(main())
