"""Many streams at once while every service is killed and stopped at random moments: `make chaos`.

    python -m tests.chaos [--rounds 10] [--streams 200] [--engine fake|fp32|int8] [--strike gateway,scheduler]

The same requests are asked undisturbed first; then each round asks them again and strikes one process of each service
with SIGKILL and one with SIGSTOP, in a random order. Killed processes are started again at once, on the same port.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from functools import partial
from pathlib import Path
from typing import get_args

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from tests.chaos.fleet import SERVICES
from tests.chaos.plan import EngineName, Plan
from tests.chaos.run import run

OUT = Path("build/chaos")
MAX_TOKENS = {"fake": 800, "fp32": 64, "int8": 64}


def main() -> int:
    """0: nothing was lost, changed or left behind."""
    plan = _plan(_parser().parse_args())
    OUT.mkdir(parents=True, exist_ok=True)
    console = Console()
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[doing]}"), TimeElapsedColumn()
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("starting", total=plan.streams, doing="")
        report = asyncio.run(run(plan, OUT, partial(progress.update, bar)))
    report.print(console)
    report.write(OUT / "report.json")
    console.print(f"written to {OUT / 'report.json'}; logs beside it", highlight=False)
    return 0 if report.clean else 1


def _plan(options: argparse.Namespace) -> Plan:
    return Plan(
        rounds=options.rounds,
        streams=options.streams,
        max_tokens=options.max_tokens or MAX_TOKENS[options.engine],
        pace_ms=options.pace_ms,
        engine=options.engine,
        services=options.strike,
        seed=options.seed,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=10, help="how often everything is struck (10)")
    parser.add_argument("--streams", type=int, default=200, help="requests at once (200)")
    parser.add_argument("--engine", choices=get_args(EngineName), default="fake", help="fake, or the embedded model so")
    parser.add_argument("--max-tokens", type=int, default=0, help="length of each answer (fake: 800; a model: 64)")
    parser.add_argument("--pace-ms", type=float, default=50.0, help="fake engine: milliseconds a token (50)")
    parser.add_argument("--strike", type=_services, default=SERVICES, help="only these services, joined by commas")
    parser.add_argument("--seed", type=int, default=1, help="of the moments, the order and the victims (1)")
    return parser


def _services(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if unknown := set(names) - set(SERVICES):
        raise argparse.ArgumentTypeError(f"{', '.join(sorted(unknown))}: must be of {', '.join(SERVICES)}")
    return names


if __name__ == "__main__":
    sys.exit(main())
