"""GenerationService.Resume through the gateway."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

import grpc
import pytest

from gateway.upstream import TokenizerLink
from services.protocol.events import FinishReason
from services.runtime.errors import InvalidRequest, TailraceError, Unavailable, from_rpc_error
from tailrace.v1 import generation_pb2
from tests.integration.gateway.running_gateway import RunningGateway, running_gateway, wait_until
from tests.integration.gateway.servicer import TOKEN, ScriptedStream, ScriptedTokenizer, serving
from tests.integration.gateway.test_link import DELIVERED
from tests.integration.gateway.test_strays import (
    WORDS,
    go_on,
    make_ready,
    make_unready,
    offsets,
    text_of,
    two_tokenizers,
)


def resume(*at: tuple[int, int, int], request_id: str = "r", token: bytes = TOKEN) -> generation_pb2.ResumeRequest:
    """From (choice, token, code point) on."""
    return generation_pb2.ResumeRequest(
        request_id=request_id,
        resume_token=token,
        offsets=[generation_pb2.ChoiceOffset(choice=c, token_offset=t, text_offset=x) for c, t, x in at],
    )


async def read_all(call: Any) -> list[Any]:
    return [event async for event in call]


async def refusal(call: Any) -> TailraceError:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call.read()
    return from_rpc_error(refused.value)


async def test_a_resumed_stream_begins_with_started_and_brings_exactly_what_is_missing(
    gateway: RunningGateway, tokenizer: ScriptedTokenizer
) -> None:
    tokenizer.attach_script = go_on
    async with gateway.stub() as stub:
        events = await read_all(stub.Resume(resume((0, 1, 4))))
    assert events[0].started.request_id == "r"
    assert events[0].started.resume_token == TOKEN
    deltas = [event.delta for event in events if event.HasField("delta")]
    assert "".join(delta.text for delta in deltas) == "".join(WORDS[1:])
    assert (deltas[0].next_token_offset - len(deltas[0].token_ids), deltas[-1].next_token_offset) == (1, 4)
    assert deltas[-1].next_text_offset == len("".join(WORDS))
    assert [event.WhichOneof("event") for event in events[-2:]] == ["finish", "completed"]
    assert offsets(tokenizer.attaches[0]) == [(0, 1, 4)]
    assert tokenizer.attaches[0].resume.resume_token == TOKEN
    await wait_until(lambda: tokenizer.releases == [(tokenizer.attached[0].request.stream_id, DELIVERED)])
    assert gateway.metric("resumes_total", transport="grpc", outcome="resumed") == 1
    assert gateway.metric("output_tokens_total", transport="grpc") == 3


@pytest.mark.parametrize("answer_first", [True, False])
async def test_choices_of_which_the_caller_had_nothing_come_too_even_before_attach_is_answered(
    gateway: RunningGateway, tokenizer: ScriptedTokenizer, answer_first: bool
) -> None:
    async def three(stream: ScriptedStream) -> None:
        if answer_first:
            await asyncio.sleep(0)
        for choice in range(3):
            stream.say(f"choice {choice}", choice=choice)
            stream.finish(FinishReason.LENGTH, choice=choice)
        stream.complete()

    async def after_all_was_heard() -> None:
        [link] = gateway.gateway.router.links
        await wait_until(lambda: [stream for stream in link.streams if stream.log.usage is not None])

    tokenizer.attach_script, tokenizer.attach_n = three, 3
    if not answer_first:
        tokenizer.before_attach_answer = after_all_was_heard
    async with gateway.stub() as stub:
        events = await read_all(stub.Resume(resume((1, 0, 0))))
    for choice in range(3):
        mine = [event.delta.text for event in events if event.HasField("delta") and event.delta.choice == choice]
        assert "".join(mine) == f"choice {choice}"
    assert sorted(event.finish.choice for event in events if event.HasField("finish")) == [0, 1, 2]
    assert events[-1].HasField("completed")


async def test_an_unknown_request_is_refused_at_once(gateway: RunningGateway) -> None:
    async with gateway.stub() as stub:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.Resume(resume()).read()
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND
    assert gateway.metric("resumes_total", transport="grpc", outcome="refused") == 1
    assert gateway.gateway.open_requests() == 0


async def test_the_only_tokenizer_serves_who_comes_back_when_it_takes_nothing_new(
    gateway: RunningGateway, tokenizer: ScriptedTokenizer
) -> None:
    tokenizer.attach_script = go_on
    await make_unready(tokenizer, gateway)
    async with gateway.stub() as stub:
        assert text_of(await read_all(stub.Resume(resume((0, 1, 4))))) == "".join(WORDS[1:])


async def test_offsets_beyond_what_can_be_rebuilt_are_refused_at_once(
    gateway: RunningGateway, tokenizer: ScriptedTokenizer
) -> None:
    tokenizer.refuse_attach = lambda _: InvalidRequest("offsets", "beyond what there is")
    async with gateway.stub() as stub:
        error = await refusal(stub.Resume(resume((0, 9, 9))))
    assert isinstance(error, InvalidRequest)
    assert error.field == "offsets"


@pytest.mark.parametrize("at", [((128, 0, 0),), ((0, 1, 1), (0, 2, 2))], ids=["choice 128", "choice 0 twice"])
async def test_offsets_that_no_answer_can_have_never_leave_the_gateway(
    gateway: RunningGateway, tokenizer: ScriptedTokenizer, at: tuple[tuple[int, int, int], ...]
) -> None:
    async with gateway.stub() as stub:
        assert isinstance(await refusal(stub.Resume(resume(*at))), InvalidRequest)
    assert not tokenizer.attaches


async def test_a_caller_with_more_choices_than_there_are_is_refused(
    gateway: RunningGateway, tokenizer: ScriptedTokenizer
) -> None:
    tokenizer.attach_script = go_on
    async with gateway.stub() as stub:
        assert isinstance(await refusal(stub.Resume(resume((5, 0, 0)))), InvalidRequest)
    await wait_until(lambda: tokenizer.releases)
    assert gateway.gateway.open_requests() == 0


async def test_every_tokenizer_is_asked_for_what_it_has_and_only_the_owner_serves() -> None:
    async with (
        serving(ScriptedTokenizer()) as first,
        serving(ScriptedTokenizer()) as second,
        running_gateway(f"127.0.0.1:{first.port}", f"127.0.0.1:{second.port}") as gateway,
        gateway.stub() as stub,
    ):
        await wait_until(lambda: all(link.ready for link in gateway.gateway.router.links))
        second.attach_script = go_on
        for number in range(8):
            events = await read_all(stub.Resume(resume(request_id=f"r-{number}")))
            assert text_of(events) == "".join(WORDS)
    assert len(second.attached) == 8
    assert all(attach.only_here for attach in first.attaches + second.attaches)


async def test_what_a_tokenizer_that_is_away_may_have_is_unavailable_and_not_unknown() -> None:
    async with two_tokenizers() as (first, second, gateway), gateway.stub() as stub:
        await first.stop()
        await make_ready(second, gateway)
        await wait_until(lambda: not all(link.connected for link in gateway.gateway.router.links))
        error = await refusal(stub.Resume(resume()))
    assert isinstance(error, Unavailable)
    assert error.reason == "TOKENIZER_AWAY"


async def test_named_requests_meet_at_one_tokenizer_whichever_gateway_they_come_through() -> None:
    async with serving(ScriptedTokenizer()) as first, serving(ScriptedTokenizer()) as second:
        addresses = [f"127.0.0.1:{tokenizer.port}" for tokenizer in (first, second)]
        for order in (addresses, addresses[::-1]):
            async with running_gateway(*order) as gateway, gateway.stub() as stub:
                links = gateway.gateway.router.links
                await wait_until(partial(all_ready, links))
                for number in range(20):
                    await read_all(stub.Generate(generation_pb2.GenerateRequest(request_id=f"r-{number}", text="hi")))
        for tokenizer in (first, second):
            ids = [stream.body.request_id for stream in tokenizer.opened]
            assert ids[: len(ids) // 2] == ids[len(ids) // 2 :]
            assert len(set(ids)) == len(ids) // 2 > 0


def all_ready(links: Sequence[TokenizerLink]) -> bool:
    return all(link.ready for link in links)


async def test_a_draining_gateway_sends_those_who_come_back_elsewhere(
    gateway: RunningGateway, tokenizer: ScriptedTokenizer
) -> None:
    tokenizer.attach_script = go_on
    async with gateway.stub() as stub:
        gateway.gateway._limits.refuse_new()
        error = await refusal(stub.Resume(resume()))
    assert isinstance(error, Unavailable)
    assert error.reason == "DRAINING"
