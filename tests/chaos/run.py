"""One run of chaos, from the first process's start to the report."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import aiohttp

from cli.model_source import model_directory
from tailrace.client import Client
from tests.chaos.callers import Answer, ask_grpc, ask_sse
from tests.chaos.comparison import Expected, judge
from tests.chaos.fault import Fault
from tests.chaos.faults import strike_all
from tests.chaos.fleet import SERVICES, Fleet, running
from tests.chaos.plan import Plan
from tests.chaos.report import Report

ROUND_TIMEOUT_S = 600.0
POLL_S = 0.1
SILENCE_S = 60.0
COUNTS = dict.fromkeys(SERVICES, 2)

Show = Callable[..., None]
"""Takes `description`, `doing`, `total` and `completed`, as a progress bar does."""


async def run(plan: Plan, logs: Path, show: Show) -> Report:
    """Starts everything, asks undisturbed, strikes in each round, and waits until all is forgotten."""
    rng = random.Random(plan.seed)
    report = Report(plan.services)
    show(description="undisturbed", total=plan.streams)
    async with running(model_directory(None), COUNTS, plan.engine_flags, logs) as fleet:
        expected = await _undisturbed(fleet, plan)
        for number in range(plan.rounds):
            show(description=f"round {number + 1} of {plan.rounds}")
            answers, faults = await _round(fleet, plan, rng, show)
            report.add(answers, faults, judge(answers, expected))
        show(description="letting go", doing="")
        report.left_behind = await fleet.left_behind()
    return report


async def _round(fleet: Fleet, plan: Plan, rng: random.Random, show: Show) -> tuple[Sequence[Answer], Sequence[Fault]]:
    """All requests once more, and every fault while they are being answered."""
    answers = [Answer(question) for question in plan.questions]
    async with asyncio.timeout(ROUND_TIMEOUT_S), asyncio.TaskGroup() as tasks:
        asking = tasks.create_task(_ask_all(fleet, answers))
        watching = tasks.create_task(_watch(answers, show))
        while not asking.done() and not all(answer.moments for answer in answers):  # noqa: ASYNC110  # 200 conditions
            await asyncio.sleep(POLL_S)
        faults = await strike_all(fleet, answers, plan, rng, lambda doing: show(doing=doing))
        await asking
        watching.cancel()
    return answers, faults


async def _watch(answers: Sequence[Answer], show: Show) -> None:
    while True:
        show(completed=sum(answer.completed for answer in answers))
        await asyncio.sleep(POLL_S)


async def _ask_all(fleet: Fleet, answers: Sequence[Answer]) -> None:
    connections = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None, connect=5, sock_read=SILENCE_S)
    async with (
        Client(*fleet.grpc) as client,
        aiohttp.ClientSession(connector=connections, timeout=timeout) as session,
        asyncio.TaskGroup() as tasks,
    ):
        for answer in answers:
            if answer.question.transport == "grpc":
                tasks.create_task(ask_grpc(client, answer))
            else:
                tasks.create_task(ask_sse(session, fleet.http, answer))


async def _undisturbed(fleet: Fleet, plan: Plan) -> dict[int, Expected]:
    """What each number is answered when nothing happens; over gRPC, with the two best logprobs of a real model."""
    asked: dict[str, Any] = {} if plan.engine == "fake" else {"logprobs": 2}
    questions = plan.questions
    async with Client(*fleet.grpc) as client:
        streams = [
            client.generate(q.prompt, max_tokens=q.max_tokens, ignore_eos=True, **q.sampling, **asked)
            for q in questions
        ]
        whole = await asyncio.gather(*(stream.whole() for stream in streams))
    choices = [answer.choices[0] for answer in whole]
    return {q.number: Expected(c.text, c.token_ids, c.tokens) for q, c in zip(questions, choices, strict=True)}
