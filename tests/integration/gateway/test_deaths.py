"""Gateways and tokenizers as real processes, killed with SIGKILL in the middle of streams that lose no byte."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest

from cli.stack import free_ports
from tailrace.client import Answer, Client
from tests.chaos.callers import Answer as SseAnswer
from tests.chaos.callers import Question, ask_sse
from tests.integration.tokenizer.tiny_model import write_tiny_model
from tests.killable import Killable

STREAMS = 12
TOKENS = 150
PACE_MS = 8
PAUSE_BEFORE_KILL_S = 0.4


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@dataclass
class System:
    """All processes, ready."""

    gateways: Sequence[Killable]
    tokenizers: Sequence[Killable]
    http: Sequence[str]

    def client(self, *, resume_for_s: float = 30.0) -> Client:
        """At every gateway."""
        return Client(*(gateway.address for gateway in self.gateways), resume_for_s=resume_for_s)


@asynccontextmanager
async def system(model: Path, *, gateways: int = 1, tokenizers: int = 1) -> AsyncIterator[System]:
    """One scheduler with the fake engine, one detokenizer, and as many of the others as are wanted."""
    engine = ("--engine", "fake", "--fake-first-id", "34", "--fake-end-id", "90", "--fake-pace-ms", str(PACE_MS))
    scheduler = Killable("services.scheduler", ("--model", str(model), *engine))
    detokenizer = Killable("services.detokenizer", ("--model", str(model), "--schedulers", scheduler.address))
    upstream = ("--schedulers", scheduler.address, "--detokenizers", detokenizer.address)
    heads = [Killable("services.tokenizer", ("--model", str(model), *upstream)) for _ in range(tokenizers)]
    http_ports = free_ports(gateways)
    at = ("--tokenizers", ",".join(head.address for head in heads))
    doors = [Killable("gateway", (*at, "--http-port", str(port))) for port in http_ports]
    processes = [scheduler, detokenizer, *heads, *doors]
    async with AsyncExitStack() as stack:
        for process in processes:
            stack.push_async_callback(process.kill)
            await process.start()
        await asyncio.gather(*(process.wait_ready() for process in processes))
        yield System(doors, heads, [f"http://127.0.0.1:{port}" for port in http_ports])


async def ask(client: Client) -> list[Answer]:
    """The same requests each time; none is named, so each time they are new ones."""
    return await asyncio.gather(
        *(
            client.generate(
                f"prompt {number}", seed=number, n=1 + number % 3, max_tokens=TOKENS, ignore_eos=True
            ).whole()
            for number in range(STREAMS)
        )
    )


def check_same(undisturbed: Sequence[Answer], disturbed: Sequence[Answer]) -> None:
    """Byte for byte, id for id."""
    for before, after in zip(undisturbed, disturbed, strict=True):
        assert after.choices == before.choices
        assert after.usage.output_tokens == before.usage.output_tokens


@pytest.mark.parametrize("gateways", [pytest.param(1, marks=pytest.mark.slow), 2], ids=["restarted", "another one"])
async def test_a_killed_gateway_costs_our_clients_a_pause_and_not_a_byte(model: Path, gateways: int) -> None:
    async with system(model, gateways=gateways) as running, running.client() as client:
        undisturbed = await ask(client)
        asking = asyncio.create_task(ask(client))
        for _ in range(2):
            await asyncio.sleep(PAUSE_BEFORE_KILL_S)  # somewhere in the middle, wherever that is
            await running.gateways[0].kill()
            await running.gateways[0].start()
        check_same(undisturbed, await asking)


@pytest.mark.parametrize("tokenizers", [pytest.param(1, marks=pytest.mark.slow), 2], ids=["restarted", "another one"])
async def test_a_killed_tokenizer_costs_the_gateways_callers_a_pause_and_not_a_byte(
    model: Path, tokenizers: int
) -> None:
    async with system(model, tokenizers=tokenizers) as running, running.client(resume_for_s=0) as client:
        undisturbed = await ask(client)
        asking = asyncio.create_task(ask(client))
        await asyncio.sleep(PAUSE_BEFORE_KILL_S)
        await running.tokenizers[0].kill()
        await running.tokenizers[0].start()
        check_same(undisturbed, await asking)


@pytest.mark.slow
async def test_a_stopped_tokenizer_is_left_for_another_one_and_changes_nothing_when_it_wakes(model: Path) -> None:
    async with system(model, tokenizers=2) as running, running.client(resume_for_s=0) as client:
        undisturbed = await ask(client)
        asking = asyncio.create_task(ask(client))
        await asyncio.sleep(PAUSE_BEFORE_KILL_S)
        running.tokenizers[0].send(signal.SIGSTOP)
        check_same(undisturbed, await asking)
        running.tokenizers[0].send(signal.SIGCONT)
        check_same(undisturbed, await ask(client))


async def test_an_event_source_goes_on_at_another_gateway_when_its_own_is_killed(model: Path) -> None:
    async with system(model, gateways=2) as running, aiohttp.ClientSession() as session:
        questions = [Question(2 * number + 1, TOKENS) for number in range(STREAMS)]
        undisturbed = [SseAnswer(question) for question in questions]
        await asyncio.gather(*(ask_sse(session, running.http[1:], answer) for answer in undisturbed))
        disturbed = [SseAnswer(question) for question in questions]
        asking = asyncio.gather(*(ask_sse(session, running.http, answer) for answer in disturbed))
        await asyncio.sleep(PAUSE_BEFORE_KILL_S)
        await running.gateways[0].kill()
        await running.gateways[0].start()
        await asking
        assert [(answer.whole, answer.problem, answer.text) for answer in disturbed] == [
            (True, "", answer.text) for answer in undisturbed
        ]
