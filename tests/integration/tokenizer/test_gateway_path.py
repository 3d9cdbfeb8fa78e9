from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from services.runtime.errors import Superseded, from_rpc_error
from tailrace.v1 import common_pb2, generation_pb2
from tests.integration.tokenizer.conftest import System, started
from tests.integration.tokenizer.gateway import Gateway

Options = generation_pb2.GenerationOptions


@pytest.fixture
async def gateway(system: System) -> AsyncIterator[Gateway]:
    gateway = Gateway(system.tokenizer)
    await gateway.connect()
    yield gateway
    await gateway.disconnect()


async def test_a_gateways_stream_gets_rows_finish_and_completion_and_is_forgotten_when_delivered(
    system: System, gateway: Gateway
) -> None:
    system.engine.on_submit = lambda request: system.engine.answer(request.attempt_id, "héllo")
    opened = await gateway.open(5, request_id="r-1")
    stream = await gateway.completed(5)
    assert opened.started.request_id == "r-1"
    assert len(opened.started.resume_token) == 16
    assert stream.texts == {0: "héllo"}
    assert [finish.reason for finish in stream.finishes] == [common_pb2.FINISH_REASON_STOP]
    assert system.engine.released == []
    assert system.app.open_requests() == 1
    await gateway.release(5)
    await system.until_idle()
    assert system.engine.released == [system.engine.submits[0].attempt_id]


async def test_every_choice_of_three_joins_to_its_own_text_and_the_request_ends_with_the_last(
    system: System, gateway: Gateway
) -> None:
    await gateway.open(1, options=Options(n=3))
    attempt_id = system.engine.submits[0].attempt_id
    system.engine.answer(attempt_id, "one", 0)
    system.engine.tokens(attempt_id, [(9, "thr"), (8, "ee")], 2)
    system.engine.answer(attempt_id, "two!", 1)
    await gateway.until(lambda: 1 in gateway.streams and len(gateway.streams[1].finishes) == 2)
    assert gateway.streams[1].completed is None
    system.engine.finish(attempt_id, common_pb2.FINISH_REASON_LENGTH, 2)
    stream = await gateway.completed(1)
    assert stream.texts == {0: "one", 1: "two!", 2: "three"}
    assert stream.completed is not None
    assert stream.completed.usage.prompt_tokens == 4
    assert stream.completed.usage.output_tokens == 3 + 4 + 2
    await gateway.release(1)
    await system.until_idle()


async def test_a_whole_delivery_is_one_row_at_the_choices_end(system: System, gateway: Gateway) -> None:
    await gateway.open(1, options=Options(delivery=generation_pb2.DELIVERY_WHOLE))
    attempt_id = system.engine.submits[0].attempt_id
    for piece in "some":
        system.engine.tokens(attempt_id, [(7, piece)])
    system.engine.answer(attempt_id, " text")
    stream = await gateway.completed(1)
    assert stream.texts == {0: "some text"}
    assert sum(len(batch.stream_ids) for batch in gateway.batches) == 1


async def test_a_stop_text_stops_the_engine_at_once_and_its_ids_are_kept_until_the_caller_has_them(
    system: System, gateway: Gateway
) -> None:
    await gateway.open(1, options=Options(stopping=common_pb2.StopConditions(stop=["END"])))
    submit = system.engine.submits[0]
    assert list(submit.text.stop) == ["END"]
    system.engine.tokens(submit.attempt_id, [(5, "a "), (6, "b ")])
    stop = common_pb2.StopMatch(stop="END")
    system.engine.finish(submit.attempt_id, engine_ended=False, stop=stop)
    stream = await gateway.completed(1)
    assert stream.finishes[0].stop == stop
    await system.engine.until(lambda: system.engine.aborted == [submit.attempt_id])
    assert system.engine.released == []
    await gateway.release(1)
    await system.engine.until(lambda: system.engine.released == [submit.attempt_id])
    await system.until_idle()


async def test_cached_prompt_tokens_come_with_the_engines_end(system: System, gateway: Gateway) -> None:
    await gateway.open(1)
    attempt_id = system.engine.submits[0].attempt_id
    system.engine.tokens(attempt_id, [(5, "a")])
    system.engine.finish(attempt_id, cached=3)
    stream = await gateway.completed(1)
    assert stream.completed is not None
    assert stream.completed.usage.cached_prompt_tokens == 3


async def test_a_lost_event_stream_is_replayed_from_its_streams_start(system: System, gateway: Gateway) -> None:
    await gateway.open(1)
    attempt_id = system.engine.submits[0].attempt_id
    system.engine.tokens(attempt_id, [(5, "a"), (6, "b")])
    await gateway.until(lambda: 1 in gateway.streams and gateway.streams[1].texts == {0: "ab"})
    await gateway.disconnect()
    system.engine.tokens(attempt_id, [(7, "c")])
    await gateway.connect()
    system.engine.answer(attempt_id, "d")
    stream = await gateway.completed(1)
    assert stream.texts == {0: "abcd"}
    await gateway.release(1)
    await system.until_idle()


async def test_the_newest_event_stream_of_an_epoch_wins(system: System, gateway: Gateway) -> None:
    newer = Gateway(system.tokenizer)
    await newer.connect()
    await gateway.until(lambda: gateway.ended)
    assert isinstance(gateway.ended, grpc.aio.AioRpcError)
    assert isinstance(from_rpc_error(gateway.ended), Superseded)
    await newer.open(1)
    system.engine.answer(system.engine.submits[0].attempt_id, "x")
    assert (await newer.completed(1)).texts == {0: "x"}
    await newer.disconnect()


async def test_a_gateway_that_stays_away_longer_than_the_grace_has_left(tiny_model: Path) -> None:
    async with started(tiny_model, gateway_grace_s=0.3) as system:
        gateway = Gateway(system.tokenizer)
        await gateway.connect()
        await gateway.open(1)
        await gateway.disconnect()
        attempt_id = system.engine.submits[0].attempt_id
        await system.engine.until(lambda: system.engine.released == [attempt_id])
        await system.until_idle()


async def test_a_gateway_without_an_event_stream_is_refused(system: System) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await Gateway(system.tokenizer, epoch=12345).open(1)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert system.engine.submits == []


async def test_a_stream_number_in_use_is_refused_and_its_stream_goes_on(system: System, gateway: Gateway) -> None:
    await gateway.open(1)
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await gateway.open(1)
    assert caught.value.code() is grpc.StatusCode.ALREADY_EXISTS
    system.engine.answer(system.engine.submits[0].attempt_id, "fine")
    assert (await gateway.completed(1)).texts == {0: "fine"}


async def test_a_refused_open_leaves_its_stream_number_free(system: System, gateway: Gateway) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await gateway.open(1, text="")
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    await gateway.open(1)


async def test_the_hello_names_the_model_and_what_a_request_may_use(system: System, gateway: Gateway) -> None:
    assert gateway.hello is not None
    assert gateway.hello.model_id == "tiny"
    assert gateway.hello.context_length == 512
