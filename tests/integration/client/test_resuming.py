"""A stream that is cut goes on by itself, and what its reader sees is one lawful stream."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from tailrace.client import (
    Client,
    ClientError,
    Completed,
    Delta,
    Finish,
    Handle,
    LawBroken,
    NotFound,
    Started,
    StreamCut,
    Unreachable,
)
from tailrace.client.sync import Client as BlockingClient
from tests.integration.client.servicer import Pb, ScriptedServer, completed, delta, finish, serving, started

HERE = started(resume_token=b"proof")
FIRST, SECOND, LAST = delta("hé", [1], 1, 2), delta("🙂", [2, 3], 3, 3), delta("!", [4], 4, 4)
CUT = (grpc.StatusCode.UNAVAILABLE, "the gateway died", ())


def cut_after(server: ScriptedServer, *events: Pb) -> None:
    server.script, server.status = events, CUT


def asked_for(server: ScriptedServer) -> list[list[tuple[int, int]]]:
    return [[(at.token_offset, at.text_offset) for at in resume.offsets] for resume in server.resume_requests]


async def test_a_cut_stream_goes_on_at_its_readers_offsets_as_one_lawful_stream(
    server: ScriptedServer, client: Client
) -> None:
    cut_after(server, HERE, FIRST)
    server.resumes = [[HERE, SECOND], [HERE, LAST, finish(4), completed(4)]]
    events = [event async for event in client.generate("p")]
    assert [type(event) for event in events] == [Started, Delta, Delta, Delta, Finish, Completed]
    assert "".join(event.text for event in events if isinstance(event, Delta)) == "hé🙂!"
    assert asked_for(server) == [[(1, 2)], [(3, 3)]]
    assert {(resume.request_id, resume.resume_token) for resume in server.resume_requests} == {("r-1", b"proof")}


async def test_a_stream_that_ends_without_completed_and_with_a_clean_status_is_cut_too(
    server: ScriptedServer, client: Client
) -> None:
    server.script = [HERE, FIRST]
    server.resumes = [[HERE, SECOND, finish(3), completed(3)]]
    assert await client.generate("p").text() == "hé🙂"


async def test_an_end_that_the_reader_had_is_not_told_twice(server: ScriptedServer, client: Client) -> None:
    cut_after(server, HERE, delta("a", [1], 1, 1, choice=1), finish(1, choice=1), FIRST)
    server.resumes = [[HERE, finish(1, choice=1), SECOND, finish(3), completed(4)]]
    events = [event async for event in client.generate("p", n=2)]
    assert [event.choice for event in events if isinstance(event, Finish)] == [1, 0]
    assert asked_for(server) == [[(1, 2), (1, 1)]]


@pytest.mark.parametrize(
    "again",
    [
        [started("r-2", b"proof"), SECOND, finish(3), completed(3)],
        [HERE, FIRST, SECOND, finish(3), completed(3)],
        [HERE, LAST, finish(4), completed(4)],
        [SECOND, finish(3), completed(3)],
    ],
    ids=["another request", "from the beginning", "with a hole", "without Started"],
)
async def test_what_is_not_the_rest_of_the_same_answer_breaks_the_law(
    server: ScriptedServer, client: Client, again: list[Pb]
) -> None:
    cut_after(server, HERE, FIRST)
    server.resumes = [again]
    with pytest.raises(LawBroken):
        await client.generate("p").whole()


async def test_a_choice_that_ends_otherwise_the_second_time_breaks_the_law(
    server: ScriptedServer, client: Client
) -> None:
    cut_after(server, HERE, FIRST, finish(1))
    server.resumes = [[HERE, finish(2), completed(2)]]
    with pytest.raises(LawBroken, match="otherwise"):
        await client.generate("p").whole()


async def test_a_refusal_that_lasts_ends_it_at_once_and_is_the_cuts_cause(
    server: ScriptedServer, client: Client
) -> None:
    cut_after(server, HERE, FIRST)
    with pytest.raises(StreamCut) as cut:
        await client.generate("p").whole()
    assert isinstance(cut.value.__cause__, NotFound)
    assert len(server.resume_requests) == 1


async def test_one_that_may_pass_is_tried_again_within_the_bound(server: ScriptedServer) -> None:
    cut_after(server, HERE, FIRST)
    server.resumes = [CUT, (grpc.StatusCode.INTERNAL, "RST_STREAM", ()), [HERE, SECOND, finish(3), completed(3)]]
    async with Client(server.address) as client:
        assert await client.generate("p").text() == "hé🙂"
    assert len(server.resume_requests) == 3
    server.resumes = [CUT] * 1000
    async with Client(server.address, resume_for_s=0.3) as client:
        with pytest.raises(StreamCut) as cut:
            await asyncio.wait_for(client.generate("p").whole(), 10)
    assert isinstance(cut.value.__cause__, Unreachable)
    assert len(server.resume_requests) > 4


async def test_whoever_wants_no_second_try_gets_none(server: ScriptedServer) -> None:
    cut_after(server, HERE, FIRST)
    async with Client(server.address, resume_for_s=0) as client:
        with pytest.raises(StreamCut):
            await client.generate("p").whole()
    assert not server.resume_requests


async def test_a_reader_who_cancels_while_it_waits_is_not_kept(server: ScriptedServer, client: Client) -> None:
    cut_after(server, HERE, FIRST)
    server.resumes = [CUT] * 1000
    stream = client.generate("p")
    reading = asyncio.create_task(stream.whole())
    await asyncio.wait_for(server.called.wait(), 10)
    async with asyncio.timeout(10):
        while len(server.resume_requests) < 3:  # noqa: ASYNC110  # the server has no event for it
            await asyncio.sleep(0.005)
    stream.cancel()
    with pytest.raises(StreamCut, match="cancelled"):
        await asyncio.wait_for(reading, 10)


async def test_the_next_address_is_asked_when_one_dies(server: ScriptedServer) -> None:
    async with serving() as other, Client(server.address, other.address, api_key="k") as client:
        cut_after(server, HERE, FIRST)
        other.resumes = [[HERE, SECOND, finish(3), completed(3)]]
        assert await client.generate("p").text() == "hé🙂"
        assert not server.resume_requests
        assert (server.keys, other.keys) == (["Bearer k"], ["Bearer k"])
    async with Client("127.0.0.1:1", server.address) as client:
        assert await client.detokenize([104]) == "h"


async def test_a_request_that_was_not_accepted_is_asked_once_more_and_at_every_other_server(
    server: ScriptedServer,
) -> None:
    server.script, server.status = [], CUT
    async with Client(server.address) as client:
        with pytest.raises(Unreachable):
            await client.generate("p").whole()
    assert len(server.requests) == 2
    async with serving() as other, Client(server.address, "127.0.0.1:1", other.address) as client:
        assert await client.generate("p").text() == "hé🙂"
    assert len(server.requests) == 3


async def test_a_handle_that_was_written_down_goes_on_in_another_process(server: ScriptedServer) -> None:
    server.script, server.hangs = [HERE, FIRST], True
    async with Client(server.address) as client, client.generate("p") as stream:
        assert stream.handle is None
        async for event in stream:
            if isinstance(event, Delta):
                break
        assert stream.handle is not None
        written = stream.handle.dump()
    server.resumes = [[HERE, SECOND], [HERE, LAST, finish(4), completed(4)]] * 2
    async with Client(server.address) as client:
        rest = await client.resume(Handle.load(written)).whole()
    assert rest.choices[0].text == "🙂!"
    assert rest.choices[0].finish.output_tokens == 4
    assert asked_for(server) == [[(1, 2)], [(3, 3)]]
    assert await asyncio.to_thread(_rest_of, server.address, written) == "🙂!"


def _rest_of(address: str, written: str) -> str:
    with BlockingClient(address) as client:
        return client.resume(Handle.load(written)).text()


async def test_a_handle_that_nobody_knows_is_refused_as_what_it_is(server: ScriptedServer, client: Client) -> None:
    with pytest.raises(NotFound):
        await client.resume(Handle("r-9", b"proof", [(0, 0)])).whole()


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"request_id": 1, "resume_token": "", "offsets": [[0, 0]]}', "x" * 100,
             '{"request_id": "r", "resume_token": "", "offsets": [[0, -1]]}',
             '{"request_id": "r", "resume_token": "", "offsets": []}']
)  # fmt: skip
def test_what_is_no_handle_is_refused_in_words(text: str) -> None:
    with pytest.raises(ValueError, match="no handle"):
        Handle.load(text)


async def test_what_becomes_of_a_request_without_a_reader_is_an_option(server: ScriptedServer, client: Client) -> None:
    await client.generate("p", detach=True, detach_ttl_s=1.5, retain_s=2).whole()
    options = server.requests[0].options
    assert (options.on_disconnect, options.detach_ttl_ms, options.retain_ms) == (2, 1500, 2000)


async def test_a_request_that_can_not_be_resumed_is_cut_as_ever(server: ScriptedServer, client: Client) -> None:
    cut_after(server, started(), FIRST)
    with pytest.raises(ClientError, match="the gateway died"):
        await client.generate("p").whole()
    assert not server.resume_requests
