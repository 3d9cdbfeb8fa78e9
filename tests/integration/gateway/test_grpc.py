"""GenerationService through the gateway."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest
from google.rpc import error_details_pb2, status_pb2

from services.protocol.events import FinishReason
from services.runtime.errors import InvalidRequest, Overloaded, from_rpc_error
from tailrace.v1 import common_pb2, generation_pb2
from tests.integration.gateway.running_gateway import RunningGateway, running_gateway, wait_until
from tests.integration.gateway.servicer import MODEL, ScriptedStream, ScriptedTokenizer

CALLER_GONE = 2


def request(**options: object) -> generation_pb2.GenerateRequest:
    return generation_pb2.GenerateRequest(text="hi", options=generation_pb2.GenerationOptions(**options))  # type: ignore[arg-type]


async def test_the_stream_is_started_deltas_a_finish_per_choice_and_completed(gateway: RunningGateway) -> None:
    async with gateway.stub() as stub:
        events = [event async for event in stub.Generate(request(n=2))]
    kinds = [event.WhichOneof("event") for event in events]
    assert kinds[0] == "started"
    assert kinds[-1] == "completed"
    assert kinds.count("finish") == 2
    for choice in range(2):
        deltas = [event.delta for event in events if event.HasField("delta") and event.delta.choice == choice]
        assert "".join(delta.text for delta in deltas) == "Hello world"
        assert (deltas[-1].next_token_offset, deltas[-1].next_text_offset) == (3, 11)
    assert events[-1].completed.usage == common_pb2.Usage(prompt_tokens=7, cached_prompt_tokens=2, output_tokens=6)


async def test_a_whole_delivery_is_one_delta_per_choice(gateway: RunningGateway) -> None:
    async with gateway.stub() as stub:
        events = [event async for event in stub.Generate(request(n=2, delivery=generation_pb2.DELIVERY_WHOLE))]
    assert [event.delta.text for event in events if event.HasField("delta")] == ["Hello world"] * 2


async def test_a_refusal_keeps_its_field_over_the_hop(gateway: RunningGateway, tokenizer: ScriptedTokenizer) -> None:
    tokenizer.refuse = lambda _: InvalidRequest("options.sampling.top_p", "must be at most 1")
    async with gateway.stub() as stub:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Generate(request()).read()
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert _violation(refused.value).field == "options.sampling.top_p"


async def test_overload_keeps_its_retry_hint_over_the_hop(
    gateway: RunningGateway, tokenizer: ScriptedTokenizer
) -> None:
    tokenizer.refuse = lambda _: Overloaded("the queue is full", 2.0)
    async with gateway.stub() as stub:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Generate(request()).read()
    assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert ("grpc-retry-pushback-ms", "2000") in tuple(refused.value.trailing_metadata() or ())


@pytest.mark.parametrize("n", [0, 129, 1_000_000])
async def test_a_number_of_choices_out_of_range_is_refused_before_anything_is_opened(
    gateway: RunningGateway, tokenizer: ScriptedTokenizer, n: int
) -> None:
    async with gateway.stub() as stub:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Generate(request(n=n)).read()
    assert _violation(refused.value).field == "options.n"
    assert not tokenizer.opened


async def test_a_cancelled_call_is_released(gateway: RunningGateway, tokenizer: ScriptedTokenizer) -> None:
    async def script(stream: ScriptedStream) -> None:
        stream.say("on")

    tokenizer.script = script
    async with gateway.stub() as stub:
        call = stub.Generate(request())
        await call.read()
        await call.read()
        call.cancel()
        await asyncio.wait_for(tokenizer.opened[0].released.wait(), 10)
    assert tokenizer.releases == [(1, CALLER_GONE)]
    await wait_until(lambda: gateway.gateway.open_requests() == 0)


async def test_a_caller_that_leaves_before_acceptance_is_released_too(
    gateway: RunningGateway, tokenizer: ScriptedTokenizer
) -> None:
    asked, accept = asyncio.Event(), asyncio.Event()

    async def before_open() -> None:
        asked.set()
        await accept.wait()

    tokenizer.before_open = before_open
    async with gateway.stub() as stub:
        call = stub.Generate(request())
        await asyncio.wait_for(asked.wait(), 10)
        call.cancel()
        await wait_until(lambda: tokenizer.releases == [(1, CALLER_GONE)])
    accept.set()
    assert gateway.gateway.open_requests() == 0


async def test_abort_by_id_ends_the_stream_as_aborted_and_tells_the_truth(
    gateway: RunningGateway, tokenizer: ScriptedTokenizer
) -> None:
    async def script(stream: ScriptedStream) -> None:
        stream.say("on")

    tokenizer.script = script
    named = request()
    named.request_id = "r-10"
    async with gateway.stub() as stub:
        call = stub.Generate(named)
        await call.read()
        unknown = await stub.Abort(generation_pb2.AbortRequest(request_id="r-1"))
        known = await stub.Abort(generation_pb2.AbortRequest(request_id="r-10"))
        events = await _rest(call)
    assert unknown.outcome == generation_pb2.ABORT_OUTCOME_NOT_FOUND
    assert known.outcome == generation_pb2.ABORT_OUTCOME_ABORTING
    assert [event.finish.reason for event in events if event.HasField("finish")] == [FinishReason.ABORTED.value]
    assert events[-1].HasField("completed")


async def test_a_restarted_tokenizer_cuts_its_streams_as_unavailable_and_invents_no_end(
    gateway: RunningGateway, tokenizer: ScriptedTokenizer
) -> None:
    async def script(stream: ScriptedStream) -> None:
        stream.say("on")

    tokenizer.script = script
    async with gateway.stub() as stub:
        call = stub.Generate(request())
        got: list[Any] = [await call.read(), await call.read()]
        await tokenizer.restart()
        with pytest.raises(grpc.aio.AioRpcError) as cut:
            await _rest(call)
    assert cut.value.code() is grpc.StatusCode.UNAVAILABLE
    assert [event.WhichOneof("event") for event in got] == ["started", "delta"]


async def test_the_callers_deadline_travels_as_what_is_left(
    gateway: RunningGateway, tokenizer: ScriptedTokenizer
) -> None:
    async with gateway.stub() as stub:
        async for _ in stub.Generate(request(), timeout=5):
            pass
        async for _ in stub.Generate(request()):
            pass
    bounded, unbounded = (stream.request.deadline_in_ms for stream in tokenizer.opened)
    assert 1000 < bounded <= 5100  # gRPC rounds a deadline up, and reads a clock that may be some milliseconds old
    assert unbounded == 0


async def test_tokenize_detokenize_and_models_pass_through(gateway: RunningGateway) -> None:
    async with gateway.stub() as stub:
        ids = (await stub.Tokenize(generation_pb2.TokenizeRequest(text="a bb"))).token_ids
        text = (await stub.Detokenize(generation_pb2.DetokenizeRequest(token_ids=ids))).text
        models = (await stub.ListModels(generation_pb2.ListModelsRequest())).models
    assert (list(ids), text) == ([1, 2], "x xx")
    assert [model.model_id for model in models] == [MODEL]


async def test_binary_metadata_and_a_compressed_request_do_no_harm(gateway: RunningGateway) -> None:
    metadata = (("trace-bin", b"\x00\xff"), ("authorization", "Bearer anything"))
    async with gateway.stub() as stub:
        call = stub.Generate(request(), metadata=metadata, compression=grpc.Compression.Gzip)
        events = [event async for event in call]
    assert events[-1].HasField("completed")


async def _rest(call: Any) -> list[generation_pb2.GenerationEvent]:
    events = []
    while (event := await call.read()) is not grpc.aio.EOF:
        events.append(event)
    return events


def _violation(error: grpc.aio.AioRpcError) -> error_details_pb2.BadRequest.FieldViolation:
    for key, value in error.trailing_metadata() or ():
        if key == "grpc-status-details-bin":
            for packed in status_pb2.Status.FromString(value).details:
                found = error_details_pb2.BadRequest()
                if packed.Unpack(found):
                    return found.field_violations[0]
    raise AssertionError("no field violation")


async def test_a_caller_who_took_nothing_for_too_long_and_reads_on_learns_that_its_stream_is_over(
    tokenizer: ScriptedTokenizer,
) -> None:
    async def flood(stream: ScriptedStream) -> None:
        for _ in range(200):
            stream.say("x" * 100_000)
            await asyncio.sleep(0)

    tokenizer.script = flood
    async with (
        running_gateway(f"127.0.0.1:{tokenizer.port}", slow_reader_timeout_s=0.4) as gateway,
        gateway.stub() as stub,
    ):
        call = stub.Generate(request())
        await call.read()
        await wait_until(lambda: gateway.metric("slow_readers_total"))
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await asyncio.wait_for(_rest(call), 10)
        assert from_rpc_error(ended.value).reason == "SLOW_READER"
        assert gateway.gateway.open_requests() == 0
