"""Answers that are taken up again over HTTP: event ids, /v1/requests/{id}/events, Idempotency-Key."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import aiohttp
import pytest

from services.protocol.events import FinishReason
from services.runtime.errors import AlreadyExists, InvalidRequest
from tailrace.v1 import common_pb2, generation_pb2, tokenizer_pb2
from tests.integration.gateway.running_gateway import RunningGateway, wait_until
from tests.integration.gateway.servicer import TOKEN, ScriptedStream, ScriptedTokenizer
from tests.integration.gateway.test_openai_client import MESSAGES
from tests.integration.gateway.test_strays import offsets

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@dataclass
class Events:
    """What an EventSource would have: the data of every event, and the last id as it was after each."""

    data: list[Any] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    resume_from: str = ""

    @property
    def chunks(self) -> list[dict[str, Any]]:
        return [json.loads(data) for data in self.data if data != "[DONE]"]

    def text(self, index: int = 0) -> str:
        choices = [choice for chunk in self.chunks for choice in chunk["choices"] if choice["index"] == index]
        return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)


def read(text: str, resume_from: str = "") -> Events:
    """Events as the standard has them: a block of lines each, an id that stays until the next one."""
    events, last_id = Events(resume_from=resume_from), resume_from
    for block in text.split("\n\n")[:-1]:
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        last_id = fields.get("id", last_id)
        events.data.append(fields["data"])
        events.ids.append(last_id)
    return events


async def post(http: aiohttp.ClientSession, path: str, headers: Any = None, **body: Any) -> Events:
    prompt = {"messages": MESSAGES} if path == CHAT else {"prompt": "hi"}
    async with http.post(path, json={"stream": True, **prompt, **body}, headers=headers) as response:
        assert response.status == 200, await response.text()
        return read(await response.text(), response.headers.get("X-Resume-From", ""))


async def go_on(http: aiohttp.ClientSession, event_id: str, request_id: str = "r") -> Events:
    url = f"/v1/requests/{request_id}/events"
    async with http.get(url, headers={"Last-Event-ID": event_id}) as response:
        assert response.status == 200, await response.text()
        assert response.headers["Content-Type"].startswith("text/event-stream")
        assert response.headers["X-Request-Id"] == request_id
        return read(await response.text(), event_id)


PIECES = {0: ["héllo", " ", "wörld 🙂"], 1: ["other", "", "one"]}


async def say(stream: ScriptedStream) -> None:
    """PIECES, whoever asks and wherever they stand: of a resumed stream only what is beyond its offsets."""
    n = len(PIECES) if isinstance(stream.request, tokenizer_pb2.AttachRequest) else stream.n
    for choice in range(n):
        for piece in PIECES[choice][stream.tokens.get(choice, 0) :]:
            number = stream.tokens.get(choice, 0)
            info = common_pb2.TokenInfo(token_id=number, bytes=piece.encode(), logprob=-0.5)
            stream.say(piece, choice=choice, infos=[info])
    for choice in range(n):
        stream.finish(FinishReason.STOP, choice=choice)
    stream.complete()


@pytest.fixture
def answering(tokenizer: ScriptedTokenizer) -> ScriptedTokenizer:
    tokenizer.script = tokenizer.attach_script = say
    tokenizer.attach_n = 2
    return tokenizer


async def test_whichever_event_was_the_last_the_rest_is_exactly_what_followed_it(
    http: aiohttp.ClientSession, answering: ScriptedTokenizer
) -> None:
    for path in (CHAT, COMPLETIONS):
        for extra in ({}, {"stream_options": {"include_usage": True}}, {"logprobs": True if path == CHAT else 1}):
            whole = await post(http, path, {"X-Request-Id": "r"}, n=2, **extra)
            assert whole.data[-1] == "[DONE]"
            assert (whole.text(0), whole.text(1)) == ("héllo wörld 🙂", "otherone")
            for last, event_id in enumerate(whole.ids[:-1]):
                if event_id == whole.resume_from:
                    continue  # the openings but the last, which have no id of their own
                rest = await go_on(http, event_id)
                assert joined(whole.chunks[: last + 1] + rest.chunks) == joined(whole.chunks)
                assert rest.data[-1] == "[DONE]"
                assert rest.ids[-1] == whole.ids[-1]


def joined(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """All that a caller may put together from chunks; duplicates and omissions show."""
    together: dict[str, Any] = {"usage": [chunk["usage"] for chunk in chunks if chunk.get("usage")]}
    for chunk in chunks:
        together.setdefault("envelopes", set()).add((chunk["id"], chunk["object"], chunk["created"], chunk["model"]))
        for choice in chunk["choices"]:
            parts = together.setdefault(choice["index"], {"text": "", "roles": 0, "finishes": [], "offsets": []})
            delta = choice.get("delta", {})
            parts["text"] += choice.get("text") or delta.get("content") or ""
            parts["roles"] += "role" in delta
            parts["finishes"] += [choice["finish_reason"]] if choice["finish_reason"] else []
            if choice["logprobs"]:
                parts["offsets"] += choice["logprobs"].get("text_offset") or [
                    entry["token"] for entry in choice["logprobs"]["content"]
                ]
    return together


async def test_who_had_nothing_yet_starts_at_what_the_header_said(
    http: aiohttp.ClientSession, answering: ScriptedTokenizer
) -> None:
    whole = await post(http, CHAT, {"X-Request-Id": "r"}, n=2)
    again = await go_on(http, whole.resume_from)
    assert joined(again.chunks) == joined(whole.chunks)
    assert offsets(answering.attaches[0]) == [(0, 0, 0), (1, 0, 0)]
    assert answering.attaches[0].resume.resume_token == TOKEN


async def test_every_event_of_one_answer_has_an_id_that_no_other_has_and_error_events_have_none(
    http: aiohttp.ClientSession, tokenizer: ScriptedTokenizer
) -> None:
    async def fail(stream: ScriptedStream) -> None:
        stream.say("a")
        stream.say("b")
        stream.finish(FinishReason.ERROR)
        stream.complete()

    whole = await post(http, CHAT)
    assert all(one != other for one, other in pairwise([whole.resume_from, *whole.ids]))
    tokenizer.script = fail
    failed = await post(http, CHAT)
    assert "error" in failed.chunks[-1]
    assert failed.ids[-1] == failed.ids[-2]


async def test_an_event_source_that_has_everything_is_told_to_stay_away(http: aiohttp.ClientSession) -> None:
    whole = await post(http, CHAT)
    async with http.get("/v1/requests/r/events", headers={"Last-Event-ID": whole.ids[-1]}) as response:
        assert response.status == 204


async def test_the_first_time_an_event_source_can_say_where_it_stands_in_the_url_alone(
    http: aiohttp.ClientSession, answering: ScriptedTokenizer
) -> None:
    whole = await post(http, COMPLETIONS, n=2)
    async with http.get("/v1/requests/r/events", params={"last_event_id": whole.ids[0]}) as response:
        first = read(await response.text())
    assert whole.text() == "héllo wörld 🙂"
    async with http.get(
        "/v1/requests/r/events", params={"last_event_id": whole.ids[0]}, headers={"Last-Event-ID": first.ids[-3]}
    ) as response:
        assert len(read(await response.text()).data) < len(first.data)


@pytest.mark.parametrize(
    "event_id",
    [
        "",
        "7",
        "c1-AAAA~1.x",
        "c0-AAAA",
        "c129-AAAA",
        "c2-AAAA~1.1",
        "c1-A~1.1",
        "z1-AAAA",
        "c1-AAAA~99999999999.1",
        "é",
    ],
)
async def test_an_id_that_no_event_had_is_refused_by_name(http: aiohttp.ClientSession, event_id: str) -> None:
    async with http.get("/v1/requests/r/events", params={"last_event_id": event_id}) as response:
        assert response.status == 400
        error = (await response.json())["error"]
    assert error["param"] == "Last-Event-ID"
    assert error["type"] == "invalid_request_error"


async def test_what_is_unknown_or_beyond_what_there_is_is_refused_at_once_in_openais_form(
    http: aiohttp.ClientSession, tokenizer: ScriptedTokenizer
) -> None:
    event_id = (await post(http, CHAT)).ids[-2]
    headers = {"Last-Event-ID": event_id}
    async with http.get("/v1/requests/r/events", headers=headers) as response:
        assert response.status == 404
        assert (await response.json())["error"]["code"] == "not_found"
    tokenizer.refuse_attach = lambda _: InvalidRequest("offsets", "is beyond what there is")
    async with http.get("/v1/requests/r/events", headers=headers) as response:
        assert response.status == 400
        assert (await response.json())["error"]["param"] == "Last-Event-ID"
    tokenizer.refuse_attach, tokenizer.attach_script, tokenizer.attach_n = lambda _: None, say, 2
    async with http.get("/v1/requests/r/events", headers=headers) as response:
        assert response.status == 400
    await wait_until(lambda: tokenizer.releases)


async def test_a_key_names_the_request_so_that_equal_posts_are_one_and_others_are_refused(
    http: aiohttp.ClientSession, tokenizer: ScriptedTokenizer
) -> None:
    for key in ("order-7", "an order: 7 / ü"):
        async with http.post(
            CHAT, json={"messages": MESSAGES}, headers={"Idempotency-Key": key, "X-Request-Id": "label"}
        ) as response:
            assert response.status == 200
            assert response.headers["X-Request-Id"] == tokenizer.opened[-1].body.request_id
    readable, hashed = (stream.body.request_id for stream in tokenizer.opened)
    assert readable == "key-order-7"
    assert hashed.startswith("key-")
    assert len(hashed) == 68
    tokenizer.refuse = lambda _: AlreadyExists("request 'key-order-7' with other content")
    headers = {"Idempotency-Key": "order-7"}
    async with http.post(CHAT, json={"messages": MESSAGES, "n": 2}, headers=headers) as response:
        assert response.status == 409
        assert (await response.json())["error"]["code"] == "already_exists"


@pytest.mark.parametrize("key", ["", "x" * 256])
async def test_a_key_that_can_not_be_one_is_refused_by_name(http: aiohttp.ClientSession, key: str) -> None:
    async with http.post(CHAT, json={"messages": MESSAGES}, headers={"Idempotency-Key": key}) as response:
        assert response.status == 400
        assert (await response.json())["error"]["param"] == "Idempotency-Key"


async def test_what_becomes_of_a_request_without_a_caller_is_asked_for_in_the_body(
    http: aiohttp.ClientSession, tokenizer: ScriptedTokenizer
) -> None:
    await post(http, CHAT, on_disconnect="detach", detach_ttl_ms=5000, retain_ms=6000, failover="never")
    options = tokenizer.opened[0].options
    assert options.on_disconnect == generation_pb2.ON_DISCONNECT_DETACH
    assert (options.detach_ttl_ms, options.retain_ms) == (5000, 6000)
    assert options.failover == generation_pb2.FAILOVER_NEVER
    async with http.post(CHAT, json={"messages": MESSAGES, "on_disconnect": "stay"}) as response:
        assert response.status == 400
        error = (await response.json())["error"]
    assert error["param"] == "on_disconnect"
    assert "'abort', 'detach'" in error["message"]


async def test_a_request_is_aborted_by_its_id(http: aiohttp.ClientSession, tokenizer: ScriptedTokenizer) -> None:
    async def begin(stream: ScriptedStream) -> None:
        stream.say("on")

    tokenizer.script = begin
    reading = asyncio.create_task(post(http, CHAT, {"X-Request-Id": "r-10"}))
    await wait_until(lambda: tokenizer.opened)
    async with http.delete("/v1/requests/r-1") as response:
        assert response.status == 404
    async with http.delete("/v1/requests/r-10") as response:
        assert await response.json() == {"id": "r-10", "object": "request", "outcome": "aborting"}
    assert (await reading).chunks[-1]["error"]["code"] == "aborted"


async def test_several_prompts_are_several_requests_and_their_events_have_no_ids(gateway: RunningGateway) -> None:
    async with aiohttp.ClientSession(gateway.url) as http:
        whole = await post(http, COMPLETIONS, prompt=["a", "b"])
    assert set(whole.ids) == {""}
    assert whole.data[-1] == "[DONE]"
