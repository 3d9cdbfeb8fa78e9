from __future__ import annotations

import asyncio

import grpc
import pytest

from services.runtime.errors import AlreadyExists as ServerAlreadyExists
from services.runtime.errors import InvalidRequest as ServerInvalidRequest
from services.runtime.errors import Overloaded as ServerOverloaded
from services.runtime.errors import TailraceError, grpc_code, to_status
from services.runtime.errors import Unavailable as ServerUnavailable
from tailrace.client import (
    AbortOutcome,
    AlreadyExists,
    Client,
    Completed,
    Delta,
    Finish,
    FinishReason,
    InvalidRequest,
    LawBroken,
    Overloaded,
    Started,
    StreamCut,
    Unreachable,
)
from tests.integration.client.servicer import WHOLE, ScriptedServer, completed, delta, finish, started


def refusal(error: TailraceError) -> tuple[grpc.StatusCode, str, object]:
    return grpc_code(error), error.message, (("grpc-status-details-bin", to_status(error).SerializeToString()),)


async def test_a_whole_stream_is_read_event_by_event(client: Client) -> None:
    events = [event async for event in client.generate("p")]
    assert [type(event) for event in events] == [Started, Delta, Delta, Finish, Completed]


async def test_whole_joins_text_ids_and_usage(client: Client) -> None:
    answer = await client.generate("p").whole()
    assert answer.choices[0].text == "hé🙂"
    assert answer.choices[0].token_ids == [1, 2, 3]
    assert answer.choices[0].finish.reason is FinishReason.LENGTH
    assert (answer.started.seed, answer.usage.prompt_tokens, answer.usage.output_tokens) == (7, 3, 3)


async def test_texts_has_one_text_per_choice_however_they_interleave(server: ScriptedServer, client: Client) -> None:
    server.script = [
        started(),
        delta("a", [1], 1, 1, choice=1),
        delta("x", [1], 1, 1, choice=0),
        delta("b", [2], 2, 2, choice=1),
        finish(2, choice=1),
        finish(1, choice=0),
        completed(3),
    ]
    assert await client.generate("p", n=2).texts() == ["x", "ab"]


async def test_options_reach_the_server_in_their_places(server: ScriptedServer, client: Client) -> None:
    await client.chat([{"role": "user", "content": "hi"}], max_tokens=5, top_p=0.5, stop="x", seed=0, model="m").text()
    (request,) = server.requests
    assert request.options.stopping.max_tokens == 5
    assert request.options.stopping.stop == ["x"]
    assert request.options.sampling.top_p == 0.5
    assert request.options.sampling.HasField("seed")
    assert not request.options.sampling.HasField("temperature")
    assert request.model == "m"


async def test_an_option_out_of_its_type_is_refused_by_name_before_it_is_sent(client: Client) -> None:
    with pytest.raises(InvalidRequest) as refused:
        client.generate("p", max_tokens=-1)
    assert refused.value.field == "options.stopping.max_tokens"


async def test_an_unknown_option_is_a_mistake(client: Client) -> None:
    with pytest.raises(TypeError, match="max_token"):
        client.generate("p", max_token=3)  # type: ignore[call-arg]  # the mistake is the point


@pytest.mark.parametrize(
    "broken",
    [
        pytest.param([started(), delta("b", [2], 2, 2), *WHOLE[3:]], id="a hole"),
        pytest.param([started(), WHOLE[1], WHOLE[1], *WHOLE[2:]], id="a delta twice"),
        pytest.param([started(), WHOLE[2], WHOLE[1], *WHOLE[3:]], id="deltas out of order"),
        pytest.param(WHOLE[1:], id="no Started"),
        pytest.param([started(), *WHOLE], id="Started twice"),
        pytest.param([*WHOLE[:4], finish(3), completed(3)], id="Finish twice"),
        pytest.param([*WHOLE[:2], *WHOLE[3:]], id="the last delta is missing"),
        pytest.param([*WHOLE[:4], delta("x", [4], 4, 4), completed(4)], id="a delta after the Finish"),
        pytest.param([*WHOLE[:3], completed(3)], id="Completed without Finish"),
        pytest.param([*WHOLE, completed(3)], id="something after Completed"),
        pytest.param([started(), finish(0, choice=1)], id="a choice nobody asked for"),
    ],
)
async def test_a_server_that_breaks_the_law_is_told_so(server: ScriptedServer, client: Client, broken: list) -> None:
    server.script = broken
    with pytest.raises(LawBroken):
        await client.generate("p").whole()


@pytest.mark.parametrize("length", range(1, len(WHOLE)))
async def test_a_stream_without_completed_is_cut_even_when_its_status_is_ok(
    server: ScriptedServer, client: Client, length: int
) -> None:
    server.script = WHOLE[:length]
    with pytest.raises(StreamCut):
        await client.generate("p").whole()


async def test_a_status_after_started_is_a_cut_that_names_its_cause(server: ScriptedServer, client: Client) -> None:
    server.script = WHOLE[:2]
    server.status = refusal(ServerUnavailable("the tokenizer is gone"))
    with pytest.raises(StreamCut, match="the tokenizer is gone") as cut:
        await client.generate("p").whole()
    assert isinstance(cut.value.__cause__, Unreachable)


async def test_a_refusal_names_its_field(server: ScriptedServer, client: Client) -> None:
    server.script, server.status = [], refusal(ServerInvalidRequest("options.n", "must be 1 to 128"))
    with pytest.raises(InvalidRequest) as refused:
        await client.generate("p").text()
    assert refused.value.field == "options.n"


async def test_a_full_server_says_when_to_come_back(server: ScriptedServer, client: Client) -> None:
    server.script, server.status = [], refusal(ServerOverloaded("the queue is full", 2.5))
    with pytest.raises(Overloaded) as refused:
        await client.generate("p").text()
    assert refused.value.retry_after_s == 2.5


async def test_a_duplicate_id_is_told_apart(server: ScriptedServer, client: Client) -> None:
    server.script, server.status = [], refusal(ServerAlreadyExists("request 'r-1'"))
    with pytest.raises(AlreadyExists):
        await client.generate("p").text()


async def test_no_server_is_unreachable() -> None:
    async with Client("127.0.0.1:1") as client:
        with pytest.raises(Unreachable):
            await client.generate("p").text()
        with pytest.raises(Unreachable):
            await client.list_models()


async def test_leaving_the_loop_cancels_the_call(server: ScriptedServer, client: Client) -> None:
    server.script, server.hangs = WHOLE[:2], True
    async with client.generate("p") as stream:
        async for event in stream:
            if isinstance(event, Delta):
                break
    await asyncio.wait_for(server.caller_left.wait(), 10)


async def test_cancel_ends_a_waiting_reader_with_a_cut(server: ScriptedServer, client: Client) -> None:
    server.script, server.hangs = WHOLE[:2], True
    stream = client.generate("p")
    reading = asyncio.create_task(stream.whole())
    await asyncio.wait_for(server.called.wait(), 10)
    stream.cancel()
    with pytest.raises(StreamCut, match="cancelled"):
        await reading
    await asyncio.wait_for(server.caller_left.wait(), 10)


async def test_a_cancelled_task_stays_cancelled(server: ScriptedServer, client: Client) -> None:
    server.script, server.hangs = WHOLE[:2], True
    reading = asyncio.create_task(client.generate("p").whole())
    await asyncio.wait_for(server.called.wait(), 10)
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    await asyncio.wait_for(server.caller_left.wait(), 10)


async def test_a_stream_can_be_read_once(client: Client) -> None:
    stream = client.generate("p")
    await stream.whole()
    with pytest.raises(RuntimeError, match="once"):
        await stream.whole()


async def test_abort_tells_what_it_met(client: Client) -> None:
    assert await client.abort("r-1") is AbortOutcome.ABORTING
    assert await client.abort("r-10") is AbortOutcome.NOT_FOUND


async def test_unary_calls_give_plain_values(client: Client) -> None:
    tokens = await client.tokenize("hé")
    assert tokens.token_ids == (104, 233)
    assert tokens.token_bytes == (b"h", "é".encode())
    assert (await client.tokenize([{"role": "user", "content": "x"}] * 3)).token_ids == (0, 1, 2)
    assert await client.detokenize([104, 233]) == "hé"
    assert [model.model_id for model in await client.list_models()] == ["fake"]
