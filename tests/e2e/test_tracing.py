"""One trace from a caller to the engine and back: who is whose child, what is linked, and where the time went."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import grpc.aio
import pytest

from cli.readiness import wait_ready
from gateway.app import Gateway
from gateway.config import Config as GatewayConfig
from services.detokenizer.app import DetokenizerApp
from services.detokenizer.config import Config as DetokenizerConfig
from services.scheduler.app import SchedulerApp
from services.scheduler.config import SchedulerConfig
from services.tokenizer.app import TokenizerApp
from services.tokenizer.config import Config as TokenizerConfig
from tailrace.v1 import common_pb2, generation_pb2, generation_pb2_grpc
from tests.span_collector import Collector, Told, span_collector
from tests.stack import Running, Stack, in_process_stack

TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
PARENT = f"00-{TRACE}-{CALLER}-01"
SECRET = "heliotrope"
"""Nowhere else in anything that is sent."""

PARENTS = {
    ("gateway", "chat"): "caller",
    ("gateway", "open"): "chat",
    ("gateway", "wait"): "chat",
    ("gateway", "write"): "chat",
    ("tokenizer", "request"): "chat",
    ("tokenizer", "look up"): "request",
    ("tokenizer", "encode"): "request",
    ("tokenizer", "submit"): "request",
    ("tokenizer", "wait"): "request",
    ("tokenizer", "stream"): "request",
    ("tokenizer", "deliver"): "request",
    ("tokenizer", "release"): "request",
    ("tokenizer", "attempt"): "request",
    ("scheduler", "scheduler attempt"): "attempt",
    ("scheduler", "queued"): "scheduler attempt",
    ("scheduler", "prefill"): "scheduler attempt",
    ("scheduler", "decode"): "scheduler attempt",
    ("detokenizer", "detokenize"): "scheduler attempt",
}
"""Every span of one request, and whose child it is."""


@asynccontextmanager
async def traced_stack(model: Path, **every: Any) -> AsyncIterator[tuple[Collector, Stack]]:
    async with span_collector() as collector:
        fields = {"tracing_endpoint": collector.endpoint, **every}
        async with in_process_stack(model, every=fields, scheduler={"fake_pace_ms": 5.0}) as stack:
            yield collector, stack


async def chat(stack: Stack, headers: dict[str, str], **body: Any) -> str:
    """A streamed answer, as it came."""
    asked = {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 12, "stream": True, **body}
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"{stack.url}/v1/chat/completions", json=asked, headers=headers) as response,
    ):
        assert response.status == 200
        return await response.text()


def whole(spans: list[Told]) -> bool:
    """Whether a request's last span is there, and all that were sent before it."""
    return len(spans) >= len(PARENTS)


def is_named(span: Told, name: str) -> bool:
    return span.name.split(" smollm2")[0] == name


def one(spans: list[Told], service: str, name: str) -> Told:
    (found,) = (span for span in spans if span.service == f"tailrace-{service}" and is_named(span, name))
    return found


async def test_a_request_is_one_trace_whose_phases_follow_each_other_and_hold_no_content(
    model_directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with traced_stack(model_directory) as (collector, stack):
        with caplog.at_level(logging.INFO, "tailrace.tokenizer"):
            answer = await chat(
                stack, {"traceparent": PARENT, "tracestate": "vendor=1"}, temperature=0.5, top_p=0.9, stop=["@@"]
            )
            await stack.wait_idle()
        spans = await collector.wait(whole)
    assert "[DONE]" in answer

    told = {(span.service.removeprefix("tailrace-"), span.name.split(" smollm2")[0]): span for span in spans}
    assert told.keys() == PARENTS.keys()
    ids = {name: span.span_id for (_, name), span in told.items()} | {"caller": CALLER}
    assert {where: span.parent_id for where, span in told.items()} == {w: ids[parent] for w, parent in PARENTS.items()}
    assert {(span.trace_id, span.state) for span in spans} == {(TRACE, "vendor=1")}
    assert told["tokenizer", "stream"].links == (ids["detokenize"],)
    assert not any(span.failed for span in spans)

    _tiles(told["tokenizer", "request"], spans, "look up", "encode", "submit", "wait", "stream", "deliver", "release")
    _tiles(told["scheduler", "scheduler attempt"], spans, "queued", "prefill", "decode")
    _tiles(told["gateway", "chat"], spans, "open", "wait", "write")

    door = told["gateway", "chat"].attributes
    assert door["gen_ai.operation.name"] == "chat"
    assert door["gen_ai.request.temperature"] == 0.5
    assert round(door["gen_ai.request.top_p"], 6) == 0.9
    assert door["gen_ai.request.max_tokens"] == door["gen_ai.usage.output_tokens"] == 12
    assert door["gen_ai.response.finish_reasons"] == ["length"]
    assert door["gen_ai.response.model"] == stack.model
    assert (
        door["gen_ai.usage.input_tokens"] == told["scheduler", "scheduler attempt"].attributes["tailrace.prompt_tokens"]
    )
    assert 0 < door["gen_ai.response.time_to_first_chunk"] * 1e9 < told["gateway", "chat"].ns
    assert "gen_ai.server.time_to_first_token" in told["tokenizer", "request"].attributes
    assert told["scheduler", "decode"].attributes["tailrace.blocks"] > 0
    (line,) = [vars(record)["fields"] for record in caplog.records if record.getMessage() == "request finished"]
    assert line["trace_id"] == TRACE

    text = "".join(part.split('"content":"')[1].split('"')[0] for part in answer.split("\n") if '"content":"' in part)
    sent = b"".join(collector.raw)
    assert len(text) > 3
    assert not [word for word in (SECRET, "@@", text) if word.encode() in sent]


def _tiles(parent: Told, spans: list[Told], *names: str) -> None:
    """These children of a span are its whole time, without a gap or an overlap."""
    children = [next(s for s in spans if s.parent_id == parent.span_id and s.name == name) for name in names]
    moments = [parent.start_ns, *(child.end_ns for child in children)]
    assert [child.start_ns for child in children] == moments[:-1]
    assert moments == sorted(moments)
    assert moments[-1] == parent.end_ns


async def test_over_grpc_too_and_a_context_that_cannot_be_trusted_begins_a_trace_of_its_own(
    model_directory: Path,
) -> None:
    async with traced_stack(model_directory) as (collector, stack), grpc.aio.insecure_channel(stack.grpc) as channel:
        generation = generation_pb2_grpc.GenerationServiceStub(channel)
        asked = generation_pb2.GenerateRequest(text="one", options={"stopping": {"max_tokens": 3}, "n": 2})

        async def generate(*metadata: tuple[str, str], request: generation_pb2.GenerateRequest = asked) -> None:
            async for _ in generation.Generate(request, metadata=metadata):
                pass

        await generate(("traceparent", PARENT[:-1] + "0"))  # its caller's trace is not recorded
        await generate(("traceparent", PARENT), ("tracestate", "a=1"), ("tracestate", "b=2"))
        await generate(("traceparent", PARENT.upper()), ("tracestate", "a=1"))
        refused = generation_pb2.GenerateRequest(text="one", options={"n": 2_000})
        with pytest.raises(grpc.aio.AioRpcError):
            await generate(request=refused)
        await stack.wait_idle()
        of_two_choices = len(PARENTS) + 4  # each is queued, prefilled, decoded and detokenized
        spans = await collector.wait(lambda spans: len(spans) >= 2 * of_two_choices + 1)
    known = [span for span in spans if span.trace_id == TRACE]
    door = one(known, "gateway", "text_completion")
    assert (door.parent_id, door.state) == (CALLER, "a=1,b=2")
    assert door.attributes["gen_ai.response.finish_reasons"] == ["length", "length"]
    assert len([span for span in known if span.name == "detokenize"]) == 2, "a choice each"
    others = {span.trace_id for span in spans} - {TRACE}
    assert len(others) == 2
    (untrusted, no) = sorted((s for s in spans if s.kind == "SERVER" and not s.parent_id), key=lambda s: s.failed)
    assert (untrusted.parent_id, untrusted.state) == ("", "")
    assert (no.attributes["tailrace.outcome"], no.attributes["error.type"]) == ("refused", "INVALID_REQUEST")


@dataclass
class Pair:
    """A gateway over two tokenizers over two schedulers; what is stopped leaves at once."""

    gateway: str
    tokenizers: list[Running]
    schedulers: list[Running]
    all: list[Running]


@asynccontextmanager
async def pair(model: Path, endpoint: str) -> AsyncIterator[Pair]:
    async with AsyncExitStack() as stack:
        common = {"port": 0, "admin_port": 0, "metrics_port": 0, "drain_timeout_s": 0.0, "tracing_endpoint": endpoint}
        started: list[Running] = []

        async def start(name: str, config: Any, make: Any) -> tuple[Running, str]:
            running = Running(name)
            running.start(config, make)
            stack.push_async_callback(running.end)
            started.append(running)
            return running, await running.address()

        engine = SchedulerConfig(model=model, engine="fake", fake_pace_ms=20.0, **common)
        schedulers = [await start("scheduler", engine, SchedulerApp) for _ in range(2)]
        at = {"schedulers": tuple(address for _, address in schedulers)}
        detokenizer = await start("detokenizer", DetokenizerConfig(model=model, **at, **common), DetokenizerApp)
        at["detokenizers"] = (detokenizer[1],)
        tokenizers = [
            await start("tokenizer", TokenizerConfig(name=f"tokenizer-{n}", model=model, **at, **common), TokenizerApp)
            for n in range(2)
        ]
        front = GatewayConfig(http_port=0, tokenizers=tuple(address for _, address in tokenizers), **common)
        _, gateway = await start("gateway", front, Gateway)
        for address in (*(address for _, address in tokenizers), gateway):
            await wait_ready(address)
        yield Pair(gateway, [one for one, _ in tokenizers], [one for one, _ in schedulers], started)


async def test_a_request_that_outlives_its_scheduler_and_its_tokenizer_is_one_trace_with_links(
    model_directory: Path,
) -> None:
    async with span_collector() as collector:
        async with (
            pair(model_directory, collector.endpoint) as services,
            grpc.aio.insecure_channel(services.gateway) as channel,
        ):
            generation = generation_pb2_grpc.GenerationServiceStub(channel)
            asked = generation_pb2.GenerateRequest(
                text="one",
                options=generation_pb2.GenerationOptions(
                    stopping=common_pb2.StopConditions(max_tokens=60, ignore_eos=True)
                ),
            )
            call = generation.Generate(asked, metadata=(("traceparent", PARENT),))
            deltas = 0
            async for event in call:
                deltas += event.HasField("delta")
                if deltas == 3:
                    await _the_one_with_requests(services.schedulers).end()
                if deltas == 20:
                    await _the_one_with_requests(services.tokenizers).end()
            assert event.HasField("completed")
        spans = await collector.wait(lambda spans: sum(span.name == "request" for span in spans) == 2)
    assert {span.trace_id for span in spans} == {TRACE}
    assert one(spans, "gateway", "text_completion").attributes["tailrace.outcome"] == "completed"

    first, claimed = sorted((span for span in spans if span.name == "request"), key=lambda span: span.start_ns)
    door = one(spans, "gateway", "text_completion")
    assert first.parent_id == claimed.parent_id == door.span_id
    assert first.attributes["tailrace.cut"] == "LEFT"
    attached = next(span for span in spans if span.name == "attach")
    assert (attached.parent_id, attached.links) == (door.span_id, (claimed.span_id,))

    lost, continued = sorted((span for span in spans if span.name == "attempt"), key=lambda span: span.start_ns)
    assert (lost.attributes["tailrace.attempt.outcome"], lost.failed) == ("lost", True)
    assert continued.links == (lost.span_id,)
    assert continued.attributes["tailrace.attempt.continues_tokens"] >= 3
    left, served = sorted((s for s in spans if s.name == "scheduler attempt"), key=lambda span: span.start_ns)
    assert (left.parent_id, served.parent_id) == (lost.span_id, continued.span_id)
    assert left.attributes["tailrace.attempt.outcome"] == "left"
    assert served.events == ("claimed",)
    streamed = next(s for s in spans if s.name == "stream" and s.parent_id == claimed.span_id)
    assert set(streamed.links) <= {span.span_id for span in spans if span.name == "detokenize"}
    assert streamed.links


def _the_one_with_requests(services: list[Running]) -> Running:
    (found,) = (one for one in services if one.app is not None and one.app.open_requests())
    return found
