"""A real detokenizer process's app on loopback, between a scripted scheduler and a plain gRPC client."""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from services.detokenizer.app import make_app
from services.detokenizer.config import Config
from services.protocol.sender import MAX_BATCH_BYTES
from services.runtime.app import Ports
from services.runtime.client import connect
from services.runtime.errors import (
    InvalidRequest,
    PreconditionFailed,
    Superseded,
    TailraceError,
    Unavailable,
    from_rpc_error,
)
from services.runtime.process import run_async
from tailrace.v1 import admin_pb2, admin_pb2_grpc, common_pb2, detokenizer_pb2, detokenizer_pb2_grpc, scheduler_pb2
from tests.integration.detokenizer.scripted_scheduler import Call, ScriptedScheduler, scripted_scheduler
from tests.unit.detokenizer.small_tokenizers import byte_ids, byte_level

TOKENIZER_JSON = byte_level().to_str().encode()
DIGEST = hashlib.sha256(TOKENIZER_JSON).digest()
START = scheduler_pb2.SequenceStart(sequence=1, attempt_id=11, text=scheduler_pb2.TextPlan(stop=["END"]))


class Detokenizer:
    """The running app, and a client of it."""

    def __init__(
        self,
        ports: Ports,
        channel: grpc.aio.Channel,
        scheduler: ScriptedScheduler,
        stop: asyncio.Event,
        running: asyncio.Task[int],
    ) -> None:
        self.running = running
        self.ports = ports
        self.scheduler = scheduler
        self.stop = stop
        self.stub = detokenizer_pb2_grpc.DetokenizerServiceStub(channel)

    def open(self, *, generation: int = 1, scheduler: str = "") -> Any:
        route = scheduler_pb2.RouteKey(tokenizer="tok-1", tokenizer_epoch=5, generation=generation)
        request = detokenizer_pb2.StreamTextRequest(route=route, scheduler=scheduler or self.scheduler.address)
        return self.stub.StreamText(request, timeout=30)

    async def open_route(self, *, generation: int = 1) -> tuple[Any, Call]:
        """A route past its hello, and the scheduler's end of it."""
        text = self.open(generation=generation)
        call = await self.scheduler.calls.get()
        call.hello(model_id="tiny", tokenizer_digest=DIGEST)
        assert (await text.read()).WhichOneof("payload") == "hello"
        return text, call


@pytest.fixture
async def detokenizer(tmp_path: Path) -> AsyncIterator[Detokenizer]:
    async with scripted_scheduler() as scheduler, running(tmp_path, scheduler) as app:
        yield app


@asynccontextmanager
async def running(directory: Path, scheduler: ScriptedScheduler) -> AsyncIterator[Detokenizer]:
    (directory / "tokenizer.json").write_bytes(TOKENIZER_JSON)
    (directory / "config.json").write_text(json.dumps({"vocab_size": 300, "max_position_embeddings": 64}))
    config = Config(
        model=directory, model_id="tiny", schedulers=(scheduler.address,), port=0, admin_port=0, metrics_port=0
    )
    stop = asyncio.Event()
    ports: asyncio.Future[Ports] = asyncio.get_running_loop().create_future()
    running_app = asyncio.create_task(
        run_async(
            "detokenizer", config, lambda runtime: make_app(runtime, config), stop=stop, on_ports=ports.set_result
        )
    )
    bound = await ports
    async with connect(f"127.0.0.1:{bound.public}") as channel:
        yield Detokenizer(bound, channel, scheduler, stop, running_app)
    stop.set()
    assert await running_app == 0


def ids(text: str) -> list[int]:
    return byte_ids(byte_level(), text.encode())


async def next_news(text: Any) -> detokenizer_pb2.TextBatch:
    """The next batch that isn't a heartbeat."""
    while True:
        response = await text.read()
        assert isinstance(response, detokenizer_pb2.StreamTextResponse)
        if response.batch.ByteSize():
            return response.batch


async def error_of(text: Any) -> TailraceError:
    """The status that a call ends with, as the error it stands for."""
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await _read_to_the_end(text)
    return from_rpc_error(raised.value)


async def _read_to_the_end(text: Any) -> None:
    while await text.read():
        pass


async def test_a_route_begins_with_both_hellos_and_asks_the_scheduler_once_with_its_own_key(
    detokenizer: Detokenizer,
) -> None:
    text = detokenizer.open(generation=3)
    call = await detokenizer.scheduler.calls.get()
    call.hello(model_id="tiny", tokenizer_digest=DIGEST, context_length=64)
    hello = (await text.read()).hello
    assert (hello.detokenizer.model_id, hello.detokenizer.tokenizer_digest) == ("tiny", DIGEST)
    assert (hello.scheduler.epoch, hello.scheduler.context_length) == (99, 64)
    assert (call.route.tokenizer, call.route.tokenizer_epoch, call.route.generation) == ("tok-1", 5, 3)
    assert detokenizer.scheduler.calls.empty()


async def test_tokens_become_text_with_one_finish_and_the_engines_end_beside_it(detokenizer: Detokenizer) -> None:
    text, call = await detokenizer.open_route()
    call.send(starts=[START], sequences=[1, 1], token_offsets=[0, 1], token_ids=ids("hi"))
    batch = await next_news(text)
    assert [(start.sequence, start.attempt_id) for start in batch.starts] == [(1, 11)]
    assert (list(batch.texts), list(batch.token_ids), list(batch.text_offsets)) == (["h", "i"], ids("hi"), [0, 1])
    call.send(sequences=[1], token_offsets=[2], token_counts=[5], token_ids=ids("!END?"))
    batch = await next_news(text)
    assert (list(batch.texts), list(batch.token_ids)) == (["!"], ids("!END"))
    (finish,) = batch.finishes
    assert (finish.reason, finish.stop.stop) == (common_pb2.FINISH_REASON_STOP, "END")
    assert (finish.token_offset, finish.text_offset) == (6, 3)
    end = scheduler_pb2.SequenceEnd(sequence=1, token_offset=7, reason=common_pb2.FINISH_REASON_ABORTED)
    call.send(ends=[end], released_attempt_ids=[11])
    batch = await next_news(text)
    assert list(batch.engine_ends) == [end]
    assert list(batch.released_attempt_ids) == [11]
    assert not batch.finishes


@pytest.mark.parametrize("bad", [300, 2**32 - 1])
async def test_an_id_that_does_not_exist_ends_its_sequence_with_an_error_and_its_neighbour_goes_on(
    detokenizer: Detokenizer, bad: int
) -> None:
    text, call = await detokenizer.open_route()
    other = scheduler_pb2.SequenceStart(sequence=2, attempt_id=12, text=scheduler_pb2.TextPlan())
    (letter,) = ids("a")
    call.send(starts=[START, other], sequences=[1, 2], token_offsets=[0, 0], token_ids=[bad, letter])
    call.send(sequences=[1, 2], token_offsets=[1, 1], token_ids=[letter, letter])
    ends = [
        scheduler_pb2.SequenceEnd(sequence=n, token_offset=2, reason=common_pb2.FINISH_REASON_LENGTH) for n in (1, 2)
    ]
    call.send(ends=ends)
    finishes: dict[int, detokenizer_pb2.TextFinish] = {}
    texts = {1: "", 2: ""}
    while len(finishes) < 2:
        batch = await next_news(text)
        for sequence, piece in zip(batch.sequences, batch.texts, strict=True):
            texts[sequence] += piece
        finishes |= {finish.sequence: finish for finish in batch.finishes}
    assert texts == {1: "", 2: "aa"}
    assert (finishes[1].reason, finishes[1].error.code) == (
        common_pb2.FINISH_REASON_ERROR,
        common_pb2.ERROR_CODE_BAD_MODEL_OUTPUT,
    )
    assert finishes[2].reason == common_pb2.FINISH_REASON_LENGTH


async def test_token_info_has_bytes_for_the_token_and_its_alternatives(detokenizer: Detokenizer) -> None:
    text, call = await detokenizer.open_route()
    start = scheduler_pb2.SequenceStart(sequence=1, attempt_id=11, text=scheduler_pb2.TextPlan(token_info=True))
    first, second = ids("é")
    logprobs = scheduler_pb2.TokenLogprobs(logprob=-0.5, top_ids=[first, second], top_logprobs=[-0.5, -1.5])
    call.send(
        starts=[start],
        sequences=[1],
        token_offsets=[0],
        token_counts=[2],
        token_ids=[first, second],
        row_logprobs=[scheduler_pb2.RowLogprobs(row=0, tokens=[logprobs, logprobs])],
    )
    batch = await next_news(text)
    (row,) = batch.row_tokens
    assert (row.row, b"".join(token.bytes for token in row.tokens)) == (0, "é".encode())
    assert [(top.token_id, top.bytes, top.logprob) for top in row.tokens[0].top] == [
        (first, b"\xc3", -0.5),
        (second, b"\xa9", -1.5),
    ]


async def test_silence_is_filled_with_heartbeats(detokenizer: Detokenizer) -> None:
    text, call = await detokenizer.open_route()
    call.send()
    async with asyncio.timeout(1.5):
        response = await text.read()
    assert response.WhichOneof("payload") == "batch"
    assert not response.batch.ByteSize()


async def test_a_scheduler_silent_for_two_seconds_ends_the_call_saying_so(detokenizer: Detokenizer) -> None:
    text, call = await detokenizer.open_route()
    error = await error_of(text)
    assert isinstance(error, Unavailable)
    assert "silent for 2 s" in error.message
    await call.ended.wait()


async def test_a_lost_stream_is_shown_as_down_until_it_is_asked_for_again(detokenizer: Detokenizer) -> None:
    text, call = await detokenizer.open_route()
    async with connect(f"127.0.0.1:{detokenizer.ports.admin}") as channel:
        inspection = admin_pb2_grpc.InspectionServiceStub(channel)

        async def hop() -> admin_pb2.HopView:
            (only,) = (await inspection.ListRequests(admin_pb2.ListRequestsRequest())).process.hops
            return only

        assert (await hop()).up
        call.refuse(grpc.StatusCode.UNAVAILABLE)
        await error_of(text)
        lost = await hop()
        assert (lost.up, lost.why_not, lost.route.generation) == (False, "told to refuse", 1)
        text = detokenizer.open(generation=2)
        call = await detokenizer.scheduler.calls.get()
        again = await hop()
        assert (again.up, again.route.generation, again.calls) == (False, 2, 2)
        assert again.since_ms >= lost.since_ms
        text.cancel()
        await call.ended.wait()


async def test_a_stream_that_is_let_go_is_no_longer_shown(detokenizer: Detokenizer) -> None:
    text, call = await detokenizer.open_route()
    text.cancel()
    await call.ended.wait()
    async with connect(f"127.0.0.1:{detokenizer.ports.admin}") as channel:
        inspection = admin_pb2_grpc.InspectionServiceStub(channel)
        assert not (await inspection.ListRequests(admin_pb2.ListRequestsRequest())).process.hops


async def test_a_scheduler_with_another_tokenizer_is_refused_by_name(detokenizer: Detokenizer) -> None:
    text = detokenizer.open()
    call = await detokenizer.scheduler.calls.get()
    call.hello(model_id="tiny", tokenizer_digest=bytes(32))
    error = await error_of(text)
    assert isinstance(error, PreconditionFailed)
    assert "tokenizer.json" in error.message
    assert detokenizer.scheduler.address in error.message
    await call.ended.wait()


async def test_a_scheduler_that_is_not_configured_is_never_asked(detokenizer: Detokenizer) -> None:
    error = await error_of(detokenizer.open(scheduler="127.0.0.1:1"))
    assert isinstance(error, InvalidRequest)
    assert error.field == "scheduler"
    assert detokenizer.scheduler.calls.empty()


async def test_the_schedulers_call_dies_with_the_tokenizers(detokenizer: Detokenizer) -> None:
    text, call = await detokenizer.open_route()
    text.cancel()
    async with asyncio.timeout(5):
        await call.ended.wait()


async def test_a_superseded_route_ends_as_superseded(detokenizer: Detokenizer) -> None:
    text, call = await detokenizer.open_route()
    call.refuse(grpc.StatusCode.ABORTED)
    assert isinstance(await error_of(text), Superseded)


async def test_a_stream_that_the_scheduler_ends_well_is_no_good_end(detokenizer: Detokenizer) -> None:
    text, call = await detokenizer.open_route()
    call.end()
    assert isinstance(await error_of(text), Unavailable)


async def test_a_gap_ends_this_route_and_no_other(detokenizer: Detokenizer) -> None:
    broken, broken_call = await detokenizer.open_route(generation=1)
    sound, sound_call = await detokenizer.open_route(generation=2)
    broken_call.send(starts=[START], sequences=[1], token_offsets=[1], token_ids=ids("x"))
    error = await error_of(broken)
    assert isinstance(error, Unavailable)
    assert error.reason == "PROTOCOL_BROKEN"
    await broken_call.ended.wait()
    sound_call.send(starts=[START], sequences=[1], token_offsets=[0], token_ids=ids("x"))
    assert list((await next_news(sound)).texts) == ["x"]


async def test_columns_of_different_lengths_end_the_route(detokenizer: Detokenizer) -> None:
    text, call = await detokenizer.open_route()
    call.send(starts=[START], sequences=[1], token_offsets=[0], token_ids=ids("xy"))
    assert isinstance(await error_of(text), Unavailable)


async def test_a_long_replay_arrives_whole_in_messages_of_bounded_size(detokenizer: Detokenizer) -> None:
    text, call = await detokenizer.open_route()
    word, steps = ids("0123456789") * 5000, 10
    call.send(starts=[START])
    for step in range(steps):
        call.send(sequences=[1], token_offsets=[step * len(word)], token_counts=[len(word)], token_ids=word)
    reason = common_pb2.FINISH_REASON_LENGTH
    call.send(ends=[scheduler_pb2.SequenceEnd(sequence=1, token_offset=steps * len(word), reason=reason)])
    batches = [await next_news(text)]
    while not batches[-1].finishes:
        batches.append(await next_news(text))
    assert "".join(text for batch in batches for text in batch.texts) == "0123456789" * 5000 * steps
    assert [token_id for batch in batches for token_id in batch.token_ids] == word * steps
    assert max(batch.ByteSize() for batch in batches) < 2 * MAX_BATCH_BYTES


async def test_a_process_that_stops_tells_its_tokenizers(detokenizer: Detokenizer) -> None:
    text, _ = await detokenizer.open_route()
    detokenizer.stop.set()
    error = await error_of(text)
    assert isinstance(error, Unavailable)
    assert "stopping" in error.message


async def test_a_restarted_tokenizers_route_may_begin_before_the_old_one_ends(
    detokenizer: Detokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    old, old_call = await detokenizer.open_route()
    new, new_call = await detokenizer.open_route(generation=2)
    for text, call in ((old, old_call), (new, new_call)):
        text.cancel()
        await call.ended.wait()
    assert "servicer failed" not in caplog.messages


async def test_draining_waits_for_the_finish_of_what_is_open(detokenizer: Detokenizer) -> None:
    text, call = await detokenizer.open_route()
    call.send(starts=[START], sequences=[1], token_offsets=[0], token_ids=ids("x"))
    assert list((await next_news(text)).texts) == ["x"]
    detokenizer.stop.set()
    call.send(sequences=[1], token_offsets=[1], token_counts=[3], token_ids=ids("END"))
    assert (await next_news(text)).finishes[0].stop.stop == "END"
    assert "stopping" in str(await error_of(text))


async def test_a_drain_is_told_once_to_every_route_and_is_over_when_they_have_moved(detokenizer: Detokenizer) -> None:
    text, call = await detokenizer.open_route()
    call.send(starts=[START], sequences=[1], token_offsets=[0], token_ids=ids("x"))
    assert list((await next_news(text)).texts) == ["x"]
    detokenizer.stop.set()
    while (message := await text.read()).WhichOneof("payload") != "draining":
        assert not message.batch.ByteSize()
    assert isinstance(await error_of(detokenizer.open(generation=2)), Unavailable)
    call.send(sequences=[1], token_offsets=[1], token_ids=ids("y"))
    assert list((await next_news(text)).texts) == ["y"]
    text.cancel()  # its sequence has no finish, and goes on elsewhere
    async with asyncio.timeout(5):
        await detokenizer.running


async def test_a_route_that_is_being_opened_as_the_drain_begins_is_told_too(detokenizer: Detokenizer) -> None:
    told, other = await detokenizer.open_route()
    other.send(starts=[START], sequences=[1], token_offsets=[0], token_ids=ids("x"))
    text = detokenizer.open(generation=2)
    call = await detokenizer.scheduler.calls.get()
    detokenizer.stop.set()
    while (await told.read()).WhichOneof("payload") != "draining":
        pass
    call.hello(model_id="tiny", tokenizer_digest=DIGEST)
    async with asyncio.timeout(5):
        while (await text.read()).WhichOneof("payload") != "draining":
            pass
    other.send(sequences=[1], token_offsets=[1], token_counts=[3], token_ids=ids("END"))


async def test_draining_does_not_wait_for_what_was_released_without_a_finish(detokenizer: Detokenizer) -> None:
    text, call = await detokenizer.open_route()
    call.send(starts=[START], sequences=[1], token_offsets=[0], token_ids=ids("x"))
    await next_news(text)
    detokenizer.stop.set()
    call.send(released_attempt_ids=[11])
    async with asyncio.timeout(5):
        assert "stopping" in str(await error_of(text))


async def test_an_operator_sees_what_is_remembered_and_nothing_after_its_release(detokenizer: Detokenizer) -> None:
    text, call = await detokenizer.open_route()
    call.send(starts=[START], sequences=[1], token_offsets=[0], token_counts=[3], token_ids=ids("hiE"))
    await next_news(text)
    async with connect(f"127.0.0.1:{detokenizer.ports.admin}") as channel:
        inspection = admin_pb2_grpc.InspectionServiceStub(channel)
        (view,) = (await inspection.ListRequests(admin_pb2.ListRequestsRequest())).requests
        assert view.attempt_id == 11
        (choice,) = view.choices
        assert (choice.log_token_offset, choice.log_text_offset, choice.cursor_token_offset) == (3, 3, 2)
        call.send(released_attempt_ids=[11])
        await next_news(text)
        assert (await inspection.ListRequests(admin_pb2.ListRequestsRequest())).total == 0
