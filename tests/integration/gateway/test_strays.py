"""Streams whose tokenizer is lost: another one goes on with them, and their callers see a pause at most."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from services.runtime.errors import InvalidRequest, TailraceError, Unavailable
from tailrace.v1 import common_pb2, generation_pb2, tokenizer_pb2
from tests.integration.gateway.running_gateway import RunningGateway, running_gateway, wait_until
from tests.integration.gateway.servicer import ScriptedStream, ScriptedTokenizer, serving
from tests.integration.gateway.test_link import CALLER_GONE, DELIVERED, hold

WORDS = ("one ", "two ", "three ", "four")


async def begin(stream: ScriptedStream) -> None:
    """The first half of an answer."""
    for word in WORDS[:2]:
        stream.say(word)


async def go_on(stream: ScriptedStream) -> None:
    """The rest, from wherever its reader stands: tokens are words."""
    for word in WORDS[stream.tokens.get(0, 0) :]:
        stream.say(word)
    stream.finish()
    stream.complete()


async def read(call: Any, events: list[Any]) -> None:
    async for event in call:
        events.append(event)  # noqa: PERF401  # they are looked at while they come


def text_of(events: list[Any]) -> str:
    return "".join(event.delta.text for event in events if event.HasField("delta"))


@asynccontextmanager
async def two_tokenizers(**options: Any) -> AsyncIterator[tuple[ScriptedTokenizer, ScriptedTokenizer, RunningGateway]]:
    """A gateway over two; requests are opened at the first, for the second is not ready until they are."""
    async with serving(ScriptedTokenizer()) as first, serving(ScriptedTokenizer()) as second:
        first.script = begin
        second.why_not = "not yet"
        second.epoch = 100
        async with running_gateway(f"127.0.0.1:{first.port}", f"127.0.0.1:{second.port}", **options) as gateway:
            yield first, second, gateway


async def make_ready(tokenizer: ScriptedTokenizer, gateway: RunningGateway) -> None:
    tokenizer.why_not = ""
    tokenizer.hang_up()
    link = next(link for link in gateway.gateway.router.links if str(tokenizer.port) in link.address)
    await wait_until(lambda: link.ready)


async def make_unready(tokenizer: ScriptedTokenizer, gateway: RunningGateway) -> None:
    """It goes on with what it has, and takes nothing new."""
    tokenizer.why_not = "it is draining"
    tokenizer.hang_up()
    link = next(link for link in gateway.gateway.router.links if str(tokenizer.port) in link.address)
    await wait_until(lambda: link.connected and link.why == tokenizer.why_not)


def request(number: int = 0) -> generation_pb2.GenerateRequest:
    return generation_pb2.GenerateRequest(request_id=f"r-{number}", text="hi")


def offsets(attach: tokenizer_pb2.AttachRequest) -> list[tuple[int, int, int]]:
    return [(at.choice, at.token_offset, at.text_offset) for at in attach.resume.offsets]


async def test_a_dead_tokenizers_streams_go_on_through_the_other_one_where_they_stood() -> None:
    async with two_tokenizers() as (first, second, gateway), gateway.stub() as stub:
        second.attach_script = go_on
        events: list[Any] = []
        reading = asyncio.create_task(read(stub.Generate(request()), events))
        await wait_until(lambda: text_of(events) == "one two ")
        await first.stop()
        await make_ready(second, gateway)
        await reading
        assert text_of(events) == "".join(WORDS)
        assert [event.WhichOneof("event") for event in events][-2:] == ["finish", "completed"]
        assert [event.WhichOneof("event") for event in events].count("finish") == 1
        assert offsets(second.attaches[-1]) == [(0, 2, 8)]
        assert second.attaches[-1].resume.request_id == "r-0"
        assert gateway.metric("stranded_total", outcome="found") == 1
        assert gateway.metric("open_stranded_streams") == 0
        await wait_until(lambda: second.releases[-1:] == [(second.attached[0].request.stream_id, DELIVERED)])


async def test_who_has_a_request_is_asked_before_anybody_claims_it() -> None:
    async with two_tokenizers() as (first, second, gateway), gateway.stub() as stub:
        second.attach_script = go_on
        reading = asyncio.create_task(read(stub.Generate(request()), events := []))
        await wait_until(lambda: text_of(events) == "one two ")
        await first.stop()
        second.refuse_attach = lambda attach: Unavailable("not yet")
        await make_ready(second, gateway)
        await wait_until(lambda: len(second.attaches) >= 2)
        assert [attach.only_here for attach in second.attaches[:2]] == [True, False]
        second.refuse_attach = lambda _: None
        await reading
        assert text_of(events) == "".join(WORDS)


async def test_a_hung_tokenizers_streams_move_and_it_is_told_once_it_wakes() -> None:
    async with two_tokenizers() as (first, second, gateway), gateway.stub() as stub:
        second.attach_script = go_on
        await make_ready(second, gateway)
        second.refuse = lambda _: Unavailable("takes no new ones")
        reading = asyncio.create_task(read(stub.Generate(request()), events := []))
        await wait_until(lambda: text_of(events) == "one two ")
        first.heartbeats = False
        await reading
        assert text_of(events) == "".join(WORDS)
        first.heartbeats = True
        await wait_until(lambda: (first.opened[0].request.stream_id, CALLER_GONE) in first.releases)


async def test_a_tokenizer_that_only_lost_the_connection_keeps_its_streams(
    gateway: RunningGateway, tokenizer: ScriptedTokenizer
) -> None:
    tokenizer.script = begin
    async with gateway.stub() as stub:
        reading = asyncio.create_task(read(stub.Generate(request()), events := []))
        await wait_until(lambda: text_of(events) == "one two ")
        tokenizer.hang_up()
        await wait_until(lambda: gateway.metric("duplicates_dropped_total") == 2)
        await go_on(tokenizer.opened[0])
        await reading
    assert text_of(events) == "".join(WORDS)
    assert tokenizer.calls == 2
    assert not tokenizer.attaches


async def test_a_restarted_tokenizer_is_asked_for_the_streams_of_the_dead_one(
    gateway: RunningGateway, tokenizer: ScriptedTokenizer
) -> None:
    tokenizer.script, tokenizer.attach_script = begin, go_on
    async with gateway.stub() as stub:
        reading = asyncio.create_task(read(stub.Generate(request()), events := []))
        await wait_until(lambda: text_of(events) == "one two ")
        await tokenizer.restart()
        await reading
    assert text_of(events) == "".join(WORDS)
    assert [attach.only_here for attach in tokenizer.attaches] == [False]


@pytest.mark.parametrize("reason", [tokenizer_pb2.CUT_REASON_CLAIMED, tokenizer_pb2.CUT_REASON_LEFT])
async def test_a_stream_that_its_tokenizer_gives_up_is_attached_where_the_request_is_now(
    gateway: RunningGateway, tokenizer: ScriptedTokenizer, reason: tokenizer_pb2.CutReason
) -> None:
    tokenizer.script, tokenizer.attach_script = begin, go_on
    async with gateway.stub() as stub:
        reading = asyncio.create_task(read(stub.Generate(request()), events := []))
        await wait_until(lambda: text_of(events) == "one two ")
        tokenizer.opened[0].cut(reason)
        await reading
    assert text_of(events) == "".join(WORDS)
    assert (tokenizer.opened[0].request.stream_id, CALLER_GONE) in tokenizer.releases


@pytest.mark.parametrize("refusal", [InvalidRequest("offsets", "beyond what there is"), None])
async def test_a_stream_that_nobody_can_go_on_with_is_cut_at_once_and_no_end_is_invented(
    gateway: RunningGateway, tokenizer: ScriptedTokenizer, refusal: TailraceError | None
) -> None:
    tokenizer.script = begin
    tokenizer.refuse_attach = lambda _: refusal
    async with gateway.stub() as stub:
        call = stub.Generate(request())
        events: list[Any] = []
        reading = asyncio.create_task(read(call, events))
        await wait_until(lambda: text_of(events) == "one two ")
        if refusal is None:
            tokenizer.opened[0].cut(tokenizer_pb2.CUT_REASON_LOST)
        else:
            await tokenizer.restart()
        with pytest.raises(grpc.aio.AioRpcError) as cut:
            await reading
    assert cut.value.code() is grpc.StatusCode.UNAVAILABLE
    assert [event.WhichOneof("event") for event in events] == ["started", "delta", "delta"][: len(events)]
    await wait_until(lambda: gateway.gateway.open_requests() == 0)


async def test_the_wait_for_another_tokenizer_is_bounded(tokenizer: ScriptedTokenizer) -> None:
    tokenizer.script = begin
    async with (
        running_gateway(f"127.0.0.1:{tokenizer.port}", tokenizer_grace_s=0.3) as gateway,
        gateway.stub() as stub,
    ):
        reading = asyncio.create_task(read(stub.Generate(request()), events := []))
        await wait_until(lambda: text_of(events) == "one two ")
        await tokenizer.stop()
        with pytest.raises(grpc.aio.AioRpcError) as cut:
            await asyncio.wait_for(reading, 5)
        assert cut.value.code() is grpc.StatusCode.UNAVAILABLE
        assert gateway.metric("stranded_total", outcome="cut") == 1
        assert gateway.metric("open_stranded_streams") == 0


async def test_a_caller_that_leaves_while_its_stream_is_stranded_leaves_nothing(tokenizer: ScriptedTokenizer) -> None:
    tokenizer.script = begin
    async with running_gateway(f"127.0.0.1:{tokenizer.port}") as gateway, gateway.stub() as stub:
        call = stub.Generate(request())
        await call.read()
        await tokenizer.stop()
        await wait_until(lambda: gateway.metric("open_stranded_streams") == 1)
        call.cancel()
        await wait_until(lambda: gateway.metric("open_stranded_streams") == 0)
        assert gateway.metric("stranded_total", outcome="left") == 1
        assert gateway.gateway.open_requests() == 0


async def test_a_caller_that_leaves_during_an_attach_is_released_where_it_may_have_taken_effect() -> None:
    async with two_tokenizers() as (first, second, gateway), gateway.stub() as stub:
        asked = asyncio.Event()

        async def never() -> None:
            asked.set()
            await asyncio.Event().wait()

        second.attach_script, second.before_attach_answer = hold, never
        call = stub.Generate(request())
        await call.read()
        await first.stop()
        await make_ready(second, gateway)
        await asyncio.wait_for(asked.wait(), 5)
        call.cancel()
        await wait_until(lambda: (second.attached[0].request.stream_id, CALLER_GONE) in second.releases)


async def test_a_thousand_stranded_streams_do_not_ask_all_at_once() -> None:
    async with two_tokenizers() as (first, second, gateway), gateway.stub() as stub:
        asking = most = 0

        async def count() -> None:
            nonlocal asking, most
            asking += 1
            most = max(most, asking)
            await asyncio.sleep(0.002)  # what a claim may take
            asking -= 1

        second.attach_script, second.before_attach_answer = go_on, count
        answers: list[list[Any]] = [[] for _ in range(300)]
        reading = [
            asyncio.create_task(read(stub.Generate(request(number)), answer)) for number, answer in enumerate(answers)
        ]
        await wait_until(lambda: all(text_of(answer) == "one two " for answer in answers), within_s=20)
        await first.stop()
        await make_ready(second, gateway)
        await asyncio.wait_for(asyncio.gather(*reading), 30)
        assert {text_of(answer) for answer in answers} == {"".join(WORDS)}
        assert 2 <= most <= 32


async def test_an_open_whose_tokenizer_hangs_is_opened_at_the_next_one() -> None:
    async with two_tokenizers() as (first, second, gateway), gateway.stub() as stub:
        asked = asyncio.Event()

        async def never() -> None:
            asked.set()
            await asyncio.Event().wait()

        first.before_open, second.script = never, go_on
        await make_ready(second, gateway)
        call = stub.Generate(generation_pb2.GenerateRequest(text="hi"), timeout=20)
        reading = asyncio.create_task(read(call, events := []))
        await asyncio.wait_for(asked.wait(), 5)
        first.heartbeats = False
        await reading
        assert text_of(events) == "".join(WORDS)
        # What the first one took of the caller's time is gone: it was silent for two seconds before it was left.
        assert second.opened[0].request.deadline_in_ms < 18_500


async def test_what_the_first_tokenizer_had_begun_is_not_spliced_with_the_seconds_answer() -> None:
    async with two_tokenizers() as (first, second, gateway), gateway.stub() as stub:

        async def fail_after_output() -> None:
            stream = ScriptedStream(tokenizer_pb2.OpenRequest(stream_id=1), first.publish)
            stream.say("another run")
            await asyncio.sleep(0.05)  # until it is there: the gateway shows nothing of it

        first.before_open, second.script = fail_after_output, go_on
        first.refuse = lambda _: Unavailable("its answer is lost")
        await make_ready(second, gateway)
        events: list[Any] = []
        await read(stub.Generate(generation_pb2.GenerateRequest(text="hi")), events)
        assert text_of(events) == "".join(WORDS)


async def test_replayed_output_that_differs_after_a_move_ends_with_an_integrity_error() -> None:
    async def contradict(stream: ScriptedStream) -> None:
        stream.say("other", at=(0, 0))

    async with two_tokenizers() as (first, second, gateway), gateway.stub() as stub:
        second.attach_script = contradict
        reading = asyncio.create_task(read(stub.Generate(request()), events := []))
        await wait_until(lambda: text_of(events) == "one two ")
        await first.stop()
        await make_ready(second, gateway)
        await reading
        finish = next(event.finish for event in events if event.HasField("finish"))
        assert finish.error.code == common_pb2.ERROR_CODE_INTEGRITY
        assert text_of(events) == "one two "
        assert gateway.metric("integrity_errors_total") == 1
