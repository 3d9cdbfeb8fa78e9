"""Gateways and tokenizers as real processes, killed with SIGKILL in the middle of streams that lose no byte."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import pytest

from cli.stack import free_ports
from tailrace.client import Answer, Client, Delta, Event, Options
from tailrace.client.stream import join
from tests.chaos.callers import Answer as SseAnswer
from tests.chaos.callers import Question, ask_sse
from tests.integration.tokenizer.tiny_model import write_tiny_model
from tests.killable import Killable

STREAMS = 12
TOKENS = 150
PACE_MS = 8


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


class Asking:
    """The same requests each time; none is named, so each time they are new ones."""

    def __init__(self, client: Client) -> None:
        self._events: list[list[Event]] = [[] for _ in range(STREAMS)]
        self._reading = [asyncio.create_task(self._read(client, number)) for number in range(STREAMS)]

    async def until_tokens(self, count: int) -> None:
        """Until every stream has so many tokens."""
        await until(lambda: min(map(_tokens, self._events)) >= count)

    async def answers(self) -> list[Answer]:
        """All of them, whole."""
        await asyncio.gather(*self._reading)
        return [join(events, 1 + number % 3) for number, events in enumerate(self._events)]

    async def _read(self, client: Client, number: int) -> None:
        options: Options = {"seed": number, "n": 1 + number % 3, "max_tokens": TOKENS, "ignore_eos": True}
        async for event in client.generate(f"prompt {number}", **options):
            self._events[number].append(event)


def _tokens(events: Sequence[Event]) -> int:
    return sum(len(event.token_ids) for event in events if isinstance(event, Delta))


async def ask(client: Client) -> list[Answer]:
    """What they are told when nothing happens."""
    return await Asking(client).answers()


async def until(condition: Callable[[], bool]) -> None:
    """Returns once the condition holds."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110  # what other processes have sent
            await asyncio.sleep(0.01)


def check_same(undisturbed: Sequence[Answer], disturbed: Sequence[Answer]) -> None:
    """Byte for byte, id for id."""
    for before, after in zip(undisturbed, disturbed, strict=True):
        assert after.choices == before.choices
        assert after.usage.output_tokens == before.usage.output_tokens


@pytest.mark.parametrize("gateways", [pytest.param(1, marks=pytest.mark.slow), 2], ids=["restarted", "another one"])
async def test_a_killed_gateway_costs_our_clients_a_pause_and_not_a_byte(model: Path, gateways: int) -> None:
    async with system(model, gateways=gateways) as running, running.client() as client:
        undisturbed = await ask(client)
        asking = Asking(client)
        for tokens in (20, 60):
            await asking.until_tokens(tokens)
            await running.gateways[0].kill()
            await running.gateways[0].start()
        check_same(undisturbed, await asking.answers())


@pytest.mark.parametrize("tokenizers", [pytest.param(1, marks=pytest.mark.slow), 2], ids=["restarted", "another one"])
async def test_a_killed_tokenizer_costs_the_gateways_callers_a_pause_and_not_a_byte(
    model: Path, tokenizers: int
) -> None:
    async with system(model, tokenizers=tokenizers) as running, running.client(resume_for_s=0) as client:
        undisturbed = await ask(client)
        asking = Asking(client)
        await asking.until_tokens(20)
        await running.tokenizers[0].kill()
        await running.tokenizers[0].start()
        check_same(undisturbed, await asking.answers())


@pytest.mark.slow
async def test_a_stopped_tokenizer_is_left_for_another_one_and_changes_nothing_when_it_wakes(model: Path) -> None:
    async with system(model, tokenizers=2) as running, running.client(resume_for_s=0) as client:
        undisturbed = await ask(client)
        asking = Asking(client)
        await asking.until_tokens(20)
        running.tokenizers[0].send(signal.SIGSTOP)
        check_same(undisturbed, await asking.answers())
        running.tokenizers[0].send(signal.SIGCONT)
        check_same(undisturbed, await ask(client))


async def test_an_event_source_goes_on_at_another_gateway_when_its_own_is_killed(model: Path) -> None:
    async with system(model, gateways=2) as running, aiohttp.ClientSession() as session:
        questions = [Question(2 * number + 1, TOKENS) for number in range(STREAMS)]
        undisturbed = [SseAnswer(question) for question in questions]
        await asyncio.gather(*(ask_sse(session, running.http[1:], answer) for answer in undisturbed))
        disturbed = [SseAnswer(question) for question in questions]
        asking = asyncio.gather(*(ask_sse(session, running.http, answer) for answer in disturbed))
        await until(lambda: min(len(answer.text) for answer in disturbed) >= 20)
        await running.gateways[0].kill()
        await running.gateways[0].start()
        await asking
        assert [(answer.whole, answer.problem, answer.text) for answer in disturbed] == [
            (True, "", answer.text) for answer in undisturbed
        ]
