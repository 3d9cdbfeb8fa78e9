"""A tokenizer whose scheduler and detokenizer are real processes, killed with SIGKILL in the middle of streams."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from services.runtime.client import connect
from services.tokenizer.app import TokenizerApp
from services.tokenizer.config import Config
from tailrace.v1 import common_pb2, generation_pb2, generation_pb2_grpc, tokenizer_pb2_grpc
from tests.integration.tokenizer.gateway import Gateway, Stream
from tests.integration.tokenizer.test_real_services import FREE, _process, _ready
from tests.killable import Killable

STREAMS = 12
TOKENS = 120
PACE_MS = 5


@dataclass
class Chain:
    """The three, and stubs for the tokenizer's port."""

    schedulers: list[Killable]
    detokenizer: Killable
    app: TokenizerApp
    gateway: Gateway
    generation: generation_pb2_grpc.GenerationServiceAsyncStub

    async def ask(self, first: int) -> dict[int, Stream]:
        """The same requests each time, on streams from `first` on; returns what each was told once all are whole."""
        await asyncio.gather(*(self.open(first, number) for number in range(STREAMS)))
        return await self.answers(first)

    async def open(self, first: int, number: int) -> None:
        """One of them."""
        options = generation_pb2.GenerationOptions(
            n=1 + number % 3,
            sampling=common_pb2.SamplingParams(seed=number),
            stopping=common_pb2.StopConditions(max_tokens=TOKENS, ignore_eos=True),
            output=generation_pb2.OutputOptions(logprobs=2 if number % 4 == 0 else None),
        )
        await self.gateway.open(first + number, text=f"prompt {number}", options=options)

    async def answers(self, first: int) -> dict[int, Stream]:
        """All of them, whole."""
        await self.gateway.until(lambda: all(self.whole(first + number) for number in range(STREAMS)), 60)
        return {number: self.gateway.streams[first + number] for number in range(STREAMS)}

    async def until_tokens(self, stream_id: int, count: int) -> None:
        """Until a stream has that many tokens in its first choice."""
        streams = self.gateway.streams
        await self.gateway.until(lambda: stream_id in streams and len(streams[stream_id].ids.get(0, ())) >= count, 20)

    def whole(self, stream_id: int) -> bool:
        """Whether a stream has its completion."""
        return stream_id in self.gateway.streams and self.gateway.streams[stream_id].completed is not None

    async def until_idle(self) -> None:
        """Until the tokenizer remembers nothing."""
        async with asyncio.timeout(20):
            while self.app.open_requests():  # noqa: ASYNC110  # the process under test has no event to wait for
                await asyncio.sleep(0.01)


@asynccontextmanager
async def chain(model: Path, schedulers: int = 1) -> AsyncIterator[Chain]:
    """All of them, ready."""
    engine = ("--engine", "fake", "--fake-first-id", "34", "--fake-end-id", "90", "--fake-pace-ms", str(PACE_MS))
    engines = [Killable("services.scheduler", ("--model", str(model), *engine)) for _ in range(schedulers)]
    addresses = tuple(engine.address for engine in engines)
    detokenizer = Killable("services.detokenizer", ("--model", str(model), "--schedulers", ",".join(addresses)))
    async with AsyncExitStack() as stack:
        for process in (*engines, detokenizer):
            stack.push_async_callback(process.kill)
            await process.start()
        config = Config(model=model, schedulers=addresses, detokenizers=(detokenizer.address,), **FREE)
        app, runtime, address = await stack.enter_async_context(
            _process("tokenizer", config, lambda runtime: TokenizerApp(runtime, config))
        )
        assert isinstance(app, TokenizerApp)
        await _ready(runtime)
        channel: Any = await stack.enter_async_context(connect(address))
        gateway = Gateway(tokenizer_pb2_grpc.TokenizerServiceStub(channel))
        await gateway.connect()
        yield Chain(engines, detokenizer, app, gateway, generation_pb2_grpc.GenerationServiceStub(channel))
        await gateway.disconnect()


def check_same(undisturbed: dict[int, Stream], disturbed: dict[int, Stream]) -> None:
    """Byte for byte."""
    for number, stream in disturbed.items():
        assert stream.ids == undisturbed[number].ids
        assert stream.texts == undisturbed[number].texts
        assert sorted(map(str, stream.finishes)) == sorted(map(str, undisturbed[number].finishes))
        assert stream.completed == undisturbed[number].completed


@pytest.mark.parametrize("victim", ["scheduler", "detokenizer"])
async def test_a_killed_service_that_comes_back_costs_a_pause_and_not_a_byte(tiny_model: Path, victim: str) -> None:
    async with chain(tiny_model) as system:
        undisturbed = await system.ask(1000)
        process = system.schedulers[0] if victim == "scheduler" else system.detokenizer
        asking = asyncio.create_task(system.ask(2000))
        for tokens in (30, 80):
            await system.until_tokens(2000, tokens)
            await process.kill()
            await process.start()
        check_same(undisturbed, await asking)
        await system.gateway.release(*range(1000, 1000 + STREAMS), *range(2000, 2000 + STREAMS))
        await system.until_idle()


async def test_a_killed_scheduler_is_replaced_by_the_other_one(tiny_model: Path) -> None:
    async with chain(tiny_model, schedulers=2) as system:
        undisturbed = await system.ask(1000)
        asking = asyncio.create_task(system.ask(2000))
        await system.until_tokens(2000, 40)
        await system.schedulers[0].kill()
        check_same(undisturbed, await asking)
        await system.gateway.release(*range(1000, 1000 + STREAMS), *range(2000, 2000 + STREAMS))
        await system.until_idle()


@pytest.mark.slow
async def test_a_stopped_scheduler_is_replaced_by_the_other_one_and_changes_nothing_when_it_wakes(
    tiny_model: Path,
) -> None:
    async with chain(tiny_model, schedulers=2) as system:
        undisturbed = await system.ask(1000)
        asking = asyncio.create_task(system.ask(2000))
        await system.until_tokens(2000, 40)
        victim = system.schedulers[0].process
        assert victim is not None
        victim.send_signal(signal.SIGSTOP)
        check_same(undisturbed, await asking)
        victim.send_signal(signal.SIGCONT)
        await system.gateway.release(*range(1000, 1000 + STREAMS), *range(2000, 2000 + STREAMS))
        await system.until_idle()
