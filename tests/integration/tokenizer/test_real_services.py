"""The tokenizer with the real scheduler (fake engine) and the real detokenizer, in one loop, over loopback."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from services.detokenizer.app import DetokenizerApp
from services.detokenizer.config import Config as DetokenizerConfig
from services.runtime.app import App, Ports, Runtime
from services.runtime.client import connect
from services.runtime.config import ProcessConfig
from services.runtime.process import run_async
from services.scheduler.app import SchedulerApp
from services.scheduler.config import SchedulerConfig
from services.tokenizer.app import TokenizerApp
from services.tokenizer.config import Config
from tailrace.v1 import common_pb2, generation_pb2, generation_pb2_grpc, tokenizer_pb2_grpc
from tests.integration.tokenizer.gateway import Gateway

FREE = {"port": 0, "admin_port": 0, "metrics_port": 0, "drain_timeout_s": 1.0}
Options = generation_pb2.GenerationOptions


@dataclass
class Services:
    """Three processes' apps, and stubs for the tokenizer's port."""

    scheduler: SchedulerApp
    tokenizer_app: TokenizerApp
    tokenizer: tokenizer_pb2_grpc.TokenizerServiceAsyncStub
    generation: generation_pb2_grpc.GenerationServiceAsyncStub

    async def until_idle(self) -> None:
        """Waits until neither ledger holds anything."""
        async with asyncio.timeout(10):
            while self.tokenizer_app.open_requests() or self.scheduler.open_requests():  # noqa: ASYNC110
                await asyncio.sleep(0.01)


@pytest.fixture
async def services(tiny_model: Path) -> AsyncIterator[Services]:
    async with AsyncExitStack() as stack:

        async def start(name: str, config: ProcessConfig, make: Callable[[Runtime], App]) -> tuple[Any, Runtime, str]:
            return await stack.enter_async_context(_process(name, config, make))

        # Printable ASCII only: the fake engine's ids are then texts that are easy to compare.
        scheduler_config = SchedulerConfig(
            model=tiny_model, engine="fake", fake_first_id=34, fake_end_id=90, kv_tokens=8192, **FREE
        )
        scheduler, scheduler_runtime, scheduler_at = await start(
            "scheduler", scheduler_config, lambda runtime: SchedulerApp(runtime, scheduler_config)
        )
        await _ready(scheduler_runtime)
        detokenizer_config = DetokenizerConfig(model=tiny_model, schedulers=(scheduler_at,), **FREE)
        _, _, detokenizer_at = await start(
            "detokenizer", detokenizer_config, lambda runtime: DetokenizerApp(runtime, detokenizer_config)
        )
        config = Config(model=tiny_model, schedulers=(scheduler_at,), detokenizers=(detokenizer_at,), **FREE)
        tokenizer, tokenizer_runtime, tokenizer_at = await start(
            "tokenizer", config, lambda runtime: TokenizerApp(runtime, config)
        )
        await _ready(tokenizer_runtime)
        channel = await stack.enter_async_context(connect(tokenizer_at))
        yield Services(
            scheduler,
            tokenizer,
            tokenizer_pb2_grpc.TokenizerServiceStub(channel),
            generation_pb2_grpc.GenerationServiceStub(channel),
        )


async def test_sixty_four_mixed_streams_join_to_their_whole_answers_and_leave_nothing(services: Services) -> None:
    gateway = Gateway(services.tokenizer)
    await gateway.connect()

    def options(number: int, delivery: generation_pb2.Delivery) -> Options:
        return Options(
            n=1 + number % 3,
            sampling=common_pb2.SamplingParams(seed=number),
            stopping=common_pb2.StopConditions(max_tokens=4 + number // 2, ignore_eos=True),
            delivery=delivery,
        )

    streamed, whole = generation_pb2.DELIVERY_STREAM, generation_pb2.DELIVERY_WHOLE
    for number in range(64):
        prompt = f"prompt {number}"
        await asyncio.gather(
            gateway.open(number, text=prompt, options=options(number, streamed)),
            gateway.open(1000 + number, text=prompt, options=options(number, whole)),
        )
    for number in range(64):
        one, other = await gateway.completed(number), await gateway.completed(1000 + number)
        assert one.texts == other.texts
        assert one.ids == other.ids
        assert one.completed == other.completed
        assert sorted(finish.choice for finish in one.finishes) == list(range(1 + number % 3))
        assert {finish.reason for finish in one.finishes} == {common_pb2.FINISH_REASON_LENGTH}
        assert one.completed is not None
        assert one.completed.usage.output_tokens == (4 + number // 2) * (1 + number % 3)
    await gateway.release(*range(64), *range(1000, 1064))
    await services.until_idle()
    await gateway.disconnect()


async def test_a_stop_text_ends_the_answer_and_the_engine(services: Services) -> None:
    call: Any = services.generation.Generate(generation_pb2.GenerateRequest(text="abc", options=_until(200)))
    deltas = [event.delta async for event in call if event.HasField("delta")]
    text = "".join(delta.text for delta in deltas)
    stop = text[20:24]
    options = _until(200)
    options.stopping.stop.append(stop)
    call = services.generation.Generate(generation_pb2.GenerateRequest(text="abc", options=options))
    events = [event async for event in call]
    assert "".join(event.delta.text for event in events) == text[: text.index(stop)]
    finish = events[-2].finish
    assert (finish.reason, finish.stop.stop) == (common_pb2.FINISH_REASON_STOP, stop)
    await services.until_idle()


async def test_usage_tells_what_was_cached_before_the_request_even_after_a_stop_text(services: Services) -> None:
    prompt = "a prompt of more than two blocks of sixteen tokens"

    async def usage(options: Options) -> tuple[str, int]:
        call: Any = services.generation.Generate(generation_pb2.GenerateRequest(text=prompt, options=options))
        events = [event async for event in call]
        text = "".join(event.delta.text for event in events if event.delta.choice == 0)
        return text, events[-1].completed.usage.cached_prompt_tokens

    options = _until(200)
    options.n = 3
    text, cached = await usage(options)
    assert cached == 0, "choices find what the first of them computed; that was not there before"
    options.stopping.stop.append(text[20:24])
    assert (await usage(options))[1] == 48
    await services.until_idle()


async def test_a_hundred_callers_that_leave_at_any_moment_leave_nothing(services: Services) -> None:
    async def leave(after: int) -> None:
        call: Any = services.generation.Generate(generation_pb2.GenerateRequest(text="abc", options=_until(400)))
        for _ in range(after):
            await call.read()
        call.cancel()

    await asyncio.gather(*(leave(number % 10) for number in range(100)))
    await services.until_idle()


def _until(max_tokens: int) -> Options:
    sampling = common_pb2.SamplingParams(seed=3)
    return Options(sampling=sampling, stopping=common_pb2.StopConditions(max_tokens=max_tokens, ignore_eos=True))


@asynccontextmanager
async def _process(
    name: str, config: ProcessConfig, make: Callable[[Runtime], App]
) -> AsyncIterator[tuple[App, Runtime, str]]:
    made: list[tuple[App, Runtime]] = []
    stop, ports = asyncio.Event(), asyncio.get_running_loop().create_future()

    def make_app(runtime: Runtime) -> App:
        made.append((make(runtime), runtime))
        return made[0][0]

    running = asyncio.create_task(run_async(name, config, make_app, stop=stop, on_ports=ports.set_result))
    await asyncio.wait([running, ports], return_when=asyncio.FIRST_COMPLETED)
    bound: Ports = await ports
    yield (*made[0], f"127.0.0.1:{bound.public}")
    stop.set()
    assert await running == 0


async def _ready(runtime: Runtime) -> None:
    async with asyncio.timeout(60):
        while not runtime.ready:  # noqa: ASYNC110  # readiness has no event, only its health service
            await asyncio.sleep(0.01)
