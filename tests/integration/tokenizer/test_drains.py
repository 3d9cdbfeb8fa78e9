"""A scheduler or a detokenizer that is drained under streams, and a direct caller who doesn't read; all in one loop."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from services.detokenizer.app import DetokenizerApp
from services.detokenizer.config import Config as DetokenizerConfig
from services.runtime.app import Runtime
from services.runtime.client import connect
from services.runtime.errors import from_rpc_error
from services.scheduler.app import SchedulerApp
from services.scheduler.config import SchedulerConfig
from services.tokenizer.app import TokenizerApp
from services.tokenizer.config import Config
from tailrace.v1 import common_pb2, generation_pb2, generation_pb2_grpc, tokenizer_pb2_grpc
from tests.integration.tokenizer.gateway import Gateway, Stream
from tests.integration.tokenizer.test_deaths import check_same
from tests.integration.tokenizer.test_real_services import FREE, _process, _ready

STREAMS = 8
TOKENS = 200


@dataclass
class System:
    """Two of each behind the tokenizer, with what ends them."""

    app: TokenizerApp
    runtime: Runtime
    gateway: Gateway
    generation: generation_pb2_grpc.GenerationServiceAsyncStub
    schedulers: list[tuple[SchedulerApp, Runtime]]
    detokenizers: list[tuple[DetokenizerApp, Runtime]]

    async def open(self, first: int) -> None:
        """The same requests each time, on streams from `first` on."""
        for number in range(STREAMS):
            options = generation_pb2.GenerationOptions(
                n=1 + number % 2,
                sampling=common_pb2.SamplingParams(seed=number),
                stopping=common_pb2.StopConditions(max_tokens=TOKENS, ignore_eos=True),
            )
            await self.gateway.open(first + number, text=f"prompt {number}", options=options)

    async def answers(self, first: int) -> dict[int, Stream]:
        """All of them, whole and released."""
        streams = {number: await self.gateway.completed(first + number) for number in range(STREAMS)}
        await self.gateway.release(*range(first, first + STREAMS))
        return streams

    async def until_tokens(self, stream_id: int, count: int) -> None:
        """Until a stream has so many."""
        streams = self.gateway.streams
        await self.gateway.until(lambda: stream_id in streams and len(streams[stream_id].ids.get(0, ())) >= count)

    def metric(self, name: str) -> float | None:
        """One of the tokenizer's metrics."""
        return self.runtime.registry.get_sample_value(f"tailrace_tokenizer_{name}")

    async def until_idle(self) -> None:
        """Until the tokenizer remembers nothing."""
        async with asyncio.timeout(10):
            while self.app.open_requests():  # noqa: ASYNC110  # the process under test has no event to wait for
                await asyncio.sleep(0.01)


@asynccontextmanager
async def running(model: Path, *, schedulers: int = 1, **settings: Any) -> AsyncIterator[System]:
    """All of them, ready."""
    async with AsyncExitStack() as stack:

        async def start(name: str, config: Any, make_app: Any) -> tuple[Any, Runtime, str]:
            return await stack.enter_async_context(_process(name, config, lambda runtime: make_app(runtime, config)))

        engine = SchedulerConfig(
            model=model, engine="fake", fake_first_id=34, fake_end_id=90, fake_pace_ms=5.0, kv_tokens=32768, **FREE
        )
        engines = [await start("scheduler", engine, SchedulerApp) for _ in range(schedulers)]
        for _, runtime, _ in engines:
            await _ready(runtime)
        scheduler_addresses = tuple(address for _, _, address in engines)
        decoding = DetokenizerConfig(model=model, schedulers=scheduler_addresses, **{**FREE, "drain_timeout_s": 20.0})
        decoders = [await start("detokenizer", decoding, DetokenizerApp) for _ in range(2)]
        config = Config(
            model=model, schedulers=scheduler_addresses, detokenizers=tuple(address for _, _, address in decoders),
            **FREE, **settings,
        )  # fmt: skip
        app, runtime, address = await start("tokenizer", config, TokenizerApp)
        await _ready(runtime)
        channel: Any = await stack.enter_async_context(connect(address))
        gateway = Gateway(tokenizer_pb2_grpc.TokenizerServiceStub(channel))
        await gateway.connect()
        yield System(
            app,
            runtime,
            gateway,
            generation_pb2_grpc.GenerationServiceStub(channel),
            [(engine_app, engine_runtime) for engine_app, engine_runtime, _ in engines],
            [(decoder_app, decoder_runtime) for decoder_app, decoder_runtime, _ in decoders],
        )
        await gateway.disconnect()


async def test_a_draining_detokenizers_route_is_opened_elsewhere_before_it_goes(
    tiny_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(tiny_model) as system:
        await system.open(1000)
        undisturbed = await system.answers(1000)
        await system.open(2000)
        await system.until_tokens(2000, 40)
        caplog.clear()
        (old, old_runtime), (new, _) = system.detokenizers
        assert (old.open_requests(), new.open_requests()) == (12, 0)
        old_runtime.request_drain()
        await system.until_tokens(2000, 80)
        check_same(undisturbed, await system.answers(2000))
        assert old.open_requests() == 0
        assert system.metric("route_opens_total") == 2
        assert "not ready" not in caplog.messages  # not for a moment
        await system.until_idle()


async def test_a_lone_detokenizer_that_drains_finishes_what_is_open(tiny_model: Path) -> None:
    async with running(tiny_model) as system:
        await system.open(1000)
        await system.until_tokens(1000, 40)
        for _, runtime in system.detokenizers:
            runtime.request_drain()
        assert len((await system.answers(1000))[0].ids[0]) == TOKENS
        await system.until_idle()


async def test_a_draining_scheduler_gets_nothing_new_and_hands_over_what_it_has_not_finished(tiny_model: Path) -> None:
    async with running(tiny_model, schedulers=2) as system:
        await system.open(1000)
        undisturbed = await system.answers(1000)
        await system.open(2000)
        await system.until_tokens(2000, 40)
        (old, old_runtime), (new, _) = system.schedulers
        assert old.open_requests()
        assert new.open_requests()
        old_runtime.request_drain(0.3)
        held = old.open_requests()
        await system.open(3000)
        assert old.open_requests() <= held
        check_same(undisturbed, await system.answers(2000))
        check_same(undisturbed, await system.answers(3000))
        await system.until_idle()


async def test_a_direct_caller_who_takes_nothing_is_ended_and_its_neighbour_is_not(tiny_model: Path) -> None:
    async with running(tiny_model, slow_reader_timeout_s=0.4) as system:
        options = generation_pb2.GenerationOptions(
            n=64,
            stopping=common_pb2.StopConditions(max_tokens=400, ignore_eos=True),
            output=generation_pb2.OutputOptions(logprobs=20),
        )
        slow: Any = system.generation.Generate(generation_pb2.GenerateRequest(text="abc", options=options))
        assert (await slow.read()).HasField("started")
        await system.open(1000)
        assert len((await system.answers(1000))[0].ids[0]) == TOKENS
        await system.until_idle()
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await asyncio.wait_for(_rest(slow), 10)
        assert from_rpc_error(ended.value).reason == "SLOW_READER"


async def _rest(call: Any) -> None:
    while await call.read() is not grpc.aio.EOF:
        pass
