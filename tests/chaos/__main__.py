"""Many streams at once while every service is killed and stopped at random moments: `make chaos`.

    python -m tests.chaos [--rounds 10] [--streams 200] [--engine fake|torch] [--strike gateway,scheduler] [--seed 1]

The same requests are asked undisturbed first; then each round asks them again and strikes one process of each service
with SIGKILL and one with SIGSTOP, in a random order. Killed processes are started again at once, on the same port.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from cli.model_source import model_directory
from tailrace.client import Client
from tests.chaos.callers import Answer, Question, ask_grpc, ask_sse
from tests.chaos.comparison import Expected, judge
from tests.chaos.faults import Fault, strike_all
from tests.chaos.fleet import SERVICES, Fleet, running
from tests.chaos.report import Report

OUT = Path("build/chaos")
ROUND_TIMEOUT_S = 600.0
POLL_S = 0.1
SILENCE_S = 60.0
STOP_S = (0.5, 8.0)
MAX_TOKENS = {"fake": 800, "torch": 64}
COUNTS = dict.fromkeys(SERVICES, 2)


def main() -> int:
    """0: nothing was lost, changed or left behind."""
    options = _parser().parse_args()
    options.max_tokens = options.max_tokens or MAX_TOKENS[options.engine]
    console = Console()
    report = asyncio.run(_run(options, console))
    report.print(console)
    report.write(OUT / "report.json")
    console.print(f"written to {OUT / 'report.json'}; logs beside it", highlight=False)
    return 0 if report.clean else 1


async def _run(options: argparse.Namespace, console: Console) -> Report:
    rng = random.Random(options.seed)
    report = Report(options.strike)
    columns = TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[doing]}"), TimeElapsedColumn()
    with Progress(*columns, console=console) as progress:
        bar = progress.add_task("undisturbed", total=options.streams, doing="")
        async with running(model_directory(None), COUNTS, _engine_flags(options), OUT) as fleet:
            expected = await _undisturbed(fleet, options)
            for number in range(options.rounds):
                progress.reset(bar, description=f"round {number + 1} of {options.rounds}")
                answers, faults = await _round(fleet, options, rng, partial(progress.update, bar))
                report.add(answers, faults, judge(answers, expected))
            progress.update(bar, description="letting go")
            report.left_behind = await fleet.left_behind()
    return report


async def _round(
    fleet: Fleet, options: argparse.Namespace, rng: random.Random, show: Callable[..., None]
) -> tuple[Sequence[Answer], Sequence[Fault]]:
    """All requests once more, and every fault while they are being answered."""
    answers = [Answer(question) for question in _questions(options)]
    async with asyncio.timeout(ROUND_TIMEOUT_S), asyncio.TaskGroup() as tasks:
        asking = tasks.create_task(_ask_all(fleet, answers))
        watching = tasks.create_task(_watch(answers, show))
        while not asking.done() and not all(answer.moments for answer in answers):  # noqa: ASYNC110  # 200 conditions
            await asyncio.sleep(POLL_S)
        faults = await strike_all(fleet, answers, options.strike, STOP_S, rng, lambda doing: show(doing=doing))
        await asking
        watching.cancel()
    return answers, faults


async def _watch(answers: Sequence[Answer], show: Callable[..., None]) -> None:
    while True:
        show(completed=sum(answer.completed for answer in answers))
        await asyncio.sleep(POLL_S)


async def _ask_all(fleet: Fleet, answers: Sequence[Answer]) -> None:
    connections = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None, connect=5, sock_read=SILENCE_S)
    async with (
        Client(fleet.grpc_target) as client,
        aiohttp.ClientSession(connector=connections, timeout=timeout) as session,
        asyncio.TaskGroup() as tasks,
    ):
        for answer in answers:
            if answer.question.transport == "grpc":
                tasks.create_task(ask_grpc(client, answer))
            else:
                tasks.create_task(ask_sse(session, fleet.http, answer))


async def _undisturbed(fleet: Fleet, options: argparse.Namespace) -> dict[int, Expected]:
    """What each number is answered when nothing happens; over gRPC, with the two best logprobs of a real model."""
    asked: dict[str, Any] = {"logprobs": 2} if options.engine == "torch" else {}
    questions = _questions(options)
    async with Client(fleet.grpc_target) as client:
        streams = [
            client.generate(q.prompt, max_tokens=q.max_tokens, ignore_eos=True, **q.sampling, **asked)
            for q in questions
        ]
        whole = await asyncio.gather(*(stream.whole() for stream in streams))
    choices = [answer.choices[0] for answer in whole]
    return {q.number: Expected(c.text, c.token_ids, c.tokens) for q, c in zip(questions, choices, strict=True)}


def _questions(options: argparse.Namespace) -> list[Question]:
    return [Question(number, options.max_tokens) for number in range(options.streams)]


def _engine_flags(options: argparse.Namespace) -> tuple[str, ...]:
    if options.engine == "fake":
        return ("--engine", "fake", "--fake-pace-ms", str(options.pace_ms))
    return ("--engine", options.engine, "--dtype", "fp32")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.chaos", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=10, help="how often everything is struck (10)")
    parser.add_argument("--streams", type=int, default=200, help="requests at once (200)")
    parser.add_argument("--engine", choices=("fake", "torch"), default="fake", help="torch: the embedded model in fp32")
    parser.add_argument("--max-tokens", type=int, default=0, help="length of each answer (fake: 800; torch: 64)")
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
