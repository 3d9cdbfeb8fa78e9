"""What broke clients of well-known servers at their front door; each by its number in the list of scenarios."""

from __future__ import annotations

import asyncio
import io
import json
import re
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from services.protocol.events import FinishReason
from tests.integration.gateway.running_gateway import RunningGateway, running_gateway, wait_until
from tests.integration.gateway.servicer import ScriptedStream, ScriptedTokenizer, answer_hello
from tests.integration.gateway.test_link import hold
from tests.integration.gateway.test_openai_client import MESSAGES

CHAT = "/v1/chat/completions"


async def post(http: aiohttp.ClientSession, body: bytes | dict[str, Any], path: str = CHAT) -> tuple[int, Any]:
    """The status, and the body as JSON in the strict sense."""
    data = io.BytesIO(body if isinstance(body, bytes) else json.dumps(body).encode())
    async with http.post(path, data=data) as response:
        assert response.headers["Content-Type"] == "application/json; charset=utf-8"
        assert response.headers["X-Request-Id"]
        return response.status, json.loads(await response.read(), parse_constant=lambda name: pytest.fail(name))


async def events_of(http: aiohttp.ClientSession, **body: Any) -> list[str]:
    """The data of every event, split as a client does that knows all of Unicode's line ends."""
    async with http.post(CHAT, json={"messages": MESSAGES, "stream": True, **body}) as response:
        assert response.headers["Content-Type"] == "text/event-stream; charset=utf-8"
        text = (await response.read()).decode("utf-8")
    return [line.removeprefix("data: ") for line in text.splitlines() if not re.match("id: |$", line)]


async def test_1_finish_reason_is_null_until_the_last_chunk_of_each_choice_and_always_there(
    http: aiohttp.ClientSession,
) -> None:
    chunks = [json.loads(event) for event in (await events_of(http, n=2))[:-1]]
    for index in (0, 1):
        reasons = [c["choices"][0]["finish_reason"] for c in chunks if c["choices"][0]["index"] == index]
        assert reasons[-1] == "stop"
        assert set(reasons[:-1]) == {None}


async def test_2_usage_is_there_only_when_asked_for_once_and_last(http: aiohttp.ClientSession) -> None:
    plain = await events_of(http)
    assert not [event for event in plain if "usage" in event]
    asked = [json.loads(event) for event in (await events_of(http, stream_options={"include_usage": True}))[:-1]]
    assert [chunk["usage"] is not None for chunk in asked] == [False] * (len(asked) - 1) + [True]
    assert asked[-1]["choices"] == []


async def test_3_null_is_the_default_and_max_completion_tokens_wins(
    http: aiohttp.ClientSession, tokenizer: ScriptedTokenizer
) -> None:
    await post(http, {"messages": MESSAGES, "max_tokens": None})
    await post(http, {"messages": MESSAGES, "max_tokens": 5, "max_completion_tokens": 9})
    first, second = (stream.options.stopping for stream in tokenizer.opened)
    assert not first.HasField("max_tokens")
    assert second.max_tokens == 9


async def test_6_the_first_delta_has_the_role_and_an_empty_delta_does_no_harm(
    http: aiohttp.ClientSession, tokenizer: ScriptedTokenizer
) -> None:
    async def script(stream: ScriptedStream) -> None:
        for text in ("", "a", ""):
            stream.say(text)
        stream.finish()
        stream.complete()

    tokenizer.script = script
    deltas = [json.loads(event)["choices"][0]["delta"] for event in (await events_of(http))[:-1]]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert all("role" not in delta for delta in deltas[1:])
    assert "".join(delta.get("content", "") for delta in deltas) == "a"


async def test_7_separators_survive_clients_that_split_lines(
    http: aiohttp.ClientSession, tokenizer: ScriptedTokenizer
) -> None:
    text = "a\u2028b\u2029c\u0085d✅\r\n\x1ce"

    async def script(stream: ScriptedStream) -> None:
        stream.say(text)
        stream.finish()
        stream.complete()

    tokenizer.script = script
    events = await events_of(http)
    assert "".join(json.loads(e)["choices"][0]["delta"].get("content", "") for e in events[:-1]) == text
    status, whole = await post(http, {"messages": MESSAGES})
    assert (status, whole["choices"][0]["message"]["content"]) == (200, text)


async def test_8_an_error_in_the_middle_is_an_event_then_the_connection_closes_without_done(
    gateway: RunningGateway, tokenizer: ScriptedTokenizer
) -> None:
    async def script(stream: ScriptedStream) -> None:
        stream.say("some")
        stream.finish(FinishReason.ERROR)
        stream.complete()

    tokenizer.script = script
    raw = await raw_exchange(gateway, {"messages": MESSAGES, "stream": True})
    last = [line for line in raw.split(b"\r\n") if line.startswith(b"data: ")][-1]
    error = json.loads(last.removeprefix(b"data: "))["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert b"[DONE]" not in raw


async def test_done_is_the_last_event_of_an_answer_that_completed(http: aiohttp.ClientSession) -> None:
    assert (await events_of(http))[-1] == "[DONE]"


@pytest.mark.parametrize(
    "number", [b"NaN", b"Infinity", b"-Infinity", b"1e400", b"-1e400", b'"1"', b"[]", b"true", b"{}"]
)
async def test_9_what_is_no_number_is_refused_with_a_body_that_is_json(
    http: aiohttp.ClientSession, number: bytes
) -> None:
    status, body = await post(http, b'{"messages":[{"role":"user","content":"x"}],"temperature":%b}' % number)
    assert status == 400
    assert body["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize(("n", "status"), [(0, 400), (-1, 400), (1_000_000, 400), (None, 200), (128, 200)])
async def test_10_the_number_of_choices_has_bounds(http: aiohttp.ClientSession, n: int | None, status: int) -> None:
    got, body = await post(http, {"messages": MESSAGES, "n": n})
    assert got == status
    if status == 400:
        assert body["error"]["param"] == "n"


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b'{"messages":%b}' % (b"[" * 10_000 + b"]" * 10_000), 400),
        (b'{"prompt":"%b"}' % (b"x" * 10_000_000), 413),
        (b'{"messages":[%b]}' % b",".join([b"0"] * 1_000_000), 400),
        (b"", 400),
        (b"not json", 400),
        (b"[]", 400),
        (b'{"messages":[{"role":"user","content":"\\ud800"}]}', 400),
        (b'{"messages":[{"role":"user","content":"\xff"}]}', 400),
        (b"{}", 400),
    ],
    ids=["10,000 levels", "10 MB", "10⁶ messages", "nothing", "no JSON", "a list", "lone surrogate", "no UTF-8", "{}"],
)
async def test_10_what_is_too_much_or_no_json_is_refused_and_disturbs_no_neighbour(
    http: aiohttp.ClientSession, tokenizer: ScriptedTokenizer, body: bytes, status: int
) -> None:
    got, answer = await post(http, body)
    assert got == status
    assert answer["error"]["message"]
    assert not tokenizer.opened
    assert (await post(http, {"messages": MESSAGES}))[0] == 200


async def test_10_of_duplicate_keys_the_last_counts(http: aiohttp.ClientSession, tokenizer: ScriptedTokenizer) -> None:
    status, _ = await post(http, b'{"n":5,"messages":[{"role":"user","content":"x"}],"n":2}')
    assert status == 200
    assert tokenizer.opened[0].n == 2


async def test_11_silent_and_slow_connections_are_closed_and_others_served(tokenizer: ScriptedTokenizer) -> None:
    async with running_gateway(f"127.0.0.1:{tokenizer.port}", headers_timeout_s=0.5) as gateway:
        silent = [await connection(gateway) for _ in range(50)]
        slow_reader, slow_writer = await connection(gateway)
        slow_writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\n")
        async with aiohttp.ClientSession(gateway.url) as http:
            assert (await post(http, {"messages": MESSAGES}))[0] == 200
        for reader, _ in silent:
            assert await asyncio.wait_for(reader.read(), 3) == b""
        assert await asyncio.wait_for(slow_reader.read(), 3) == b""
        for _, writer in [*silent, (slow_reader, slow_writer)]:
            writer.close()


async def test_11_a_body_that_does_not_come_is_given_up(tokenizer: ScriptedTokenizer) -> None:
    async with running_gateway(f"127.0.0.1:{tokenizer.port}", body_timeout_s=0.2) as gateway:
        reader, writer = await connection(gateway)
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        head = await asyncio.wait_for(reader.readuntil(b"\r\n"), 3)
        assert b" 408 " in head
        writer.close()


async def test_11_connections_beyond_the_limit_are_refused_at_once(tokenizer: ScriptedTokenizer) -> None:
    async with running_gateway(f"127.0.0.1:{tokenizer.port}", connections_max=3) as gateway:
        held = [await connection(gateway) for _ in range(3)]
        reader, writer = await connection(gateway)
        refusal = await asyncio.wait_for(reader.read(), 3)
        assert b" 503 " in refusal
        assert json.loads(refusal.partition(b"\r\n\r\n")[2])["error"]["code"] == "too_many_connections"
        for _, each in [*held, (reader, writer)]:
            each.close()


async def test_11_a_reader_that_stops_reading_is_ended_and_its_request_released(tokenizer: ScriptedTokenizer) -> None:
    async def flood(stream: ScriptedStream) -> None:
        for _ in range(400):
            stream.say("x" * 50_000)
            await asyncio.sleep(0)

    async with running_gateway(f"127.0.0.1:{tokenizer.port}", slow_reader_timeout_s=0.4) as gateway:
        tokenizer.script = flood
        _, writer = await connection(gateway)
        writer.write(request_bytes({"messages": MESSAGES, "stream": True}))
        await wait_until(lambda: tokenizer.opened, within_s=3)
        await asyncio.wait_for(tokenizer.opened[0].released.wait(), 10)
        tokenizer.script = answer_hello
        async with aiohttp.ClientSession(gateway.url) as http:
            assert (await post(http, {"messages": MESSAGES}))[0] == 200
        writer.close()


async def test_14_stops_of_several_lines_and_scripts_arrive_as_they_are(
    http: aiohttp.ClientSession, tokenizer: ScriptedTokenizer
) -> None:
    stops = ["\n\n", "停止✅", *[f"s{i}" for i in range(20)]]
    await post(http, {"messages": MESSAGES, "stop": stops})
    await post(http, {"messages": MESSAGES, "stop": stops[1]})
    assert [list(stream.options.stopping.stop) for stream in tokenizer.opened] == [stops, [stops[1]]]


async def test_15_an_unknown_model_is_refused_in_openais_form_and_is_no_label(
    gateway: RunningGateway, http: aiohttp.ClientSession
) -> None:
    status, body = await post(http, {"messages": MESSAGES, "model": "made-up-model"})
    assert (status, body["error"]["code"], body["error"]["param"]) == (404, "model_not_found", "model")
    labels = [sample.labels for family in gateway.runtime.registry.collect() for sample in family.samples]
    assert not [label for label in labels if "made-up-model" in label.values()]
    assert gateway.metric("requests_total", transport="http", outcome="refused") == 1


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    """Alice may have one request open, Bob any number."""
    path = tmp_path / "keys.toml"
    path.write_text('[tenants.alice]\nkeys=["sk-a"]\nopen_max=1\n[tenants.bob]\nkeys=["sk-b"]\n')
    return path


async def test_16_a_key_over_its_limit_leaves_another_alone(tokenizer: ScriptedTokenizer, keys_file: Path) -> None:
    async with (
        running_gateway(f"127.0.0.1:{tokenizer.port}", api_keys_file=keys_file) as gateway,
        aiohttp.ClientSession(gateway.url, headers={"Authorization": "Bearer sk-a"}) as alice,
        aiohttp.ClientSession(gateway.url, headers={"Authorization": "Bearer sk-b"}) as bob,
    ):
        tokenizer.script = hold
        held = asyncio.create_task(post(alice, {"messages": MESSAGES}))
        await wait_until(lambda: tokenizer.opened)
        status, body = await post(alice, {"messages": MESSAGES})
        assert (status, body["error"]["code"]) == (429, "tenant_full")
        tokenizer.script = answer_hello
        assert (await post(bob, {"messages": MESSAGES}))[0] == 200
        assert [stream.request.tenant for stream in tokenizer.opened] == ["alice", "bob"]
        held.cancel()


async def test_16_a_revoked_key_stops_within_a_second(tokenizer: ScriptedTokenizer, keys_file: Path) -> None:
    async with (
        running_gateway(f"127.0.0.1:{tokenizer.port}", api_keys_file=keys_file) as gateway,
        aiohttp.ClientSession(gateway.url, headers={"Authorization": "Bearer sk-b"}) as bob,
    ):
        assert (await post(bob, {"messages": MESSAGES}))[0] == 200
        keys_file.write_text('[tenants.alice]\nkeys=["sk-a"]\n')  # noqa: ASYNC240  # a few bytes
        await asyncio.sleep(1)
        status, body = await post(bob, {"messages": MESSAGES})
    assert (status, body["error"]["code"]) == (401, "invalid_api_key")


async def test_17_roles_in_any_order_reach_the_template(
    http: aiohttp.ClientSession, tokenizer: ScriptedTokenizer
) -> None:
    roles = ["user", "system", "tool", "assistant", "user"]
    await post(http, {"messages": [{"role": role, "content": role} for role in roles]})
    assert [message.role for message in tokenizer.opened[0].request.chat.messages] == roles


async def test_18_text_parts_are_read_and_an_image_is_refused_with_the_reason(
    http: aiohttp.ClientSession, tokenizer: ScriptedTokenizer
) -> None:
    text, image = {"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "data:,"}}
    assert (await post(http, {"messages": [{"role": "user", "content": [text, text]}]}))[0] == 200
    assert tokenizer.opened[0].request.chat.messages[0].content == "aa"
    status, body = await post(http, {"messages": [{"role": "user", "content": [text, image]}]})
    assert (status, body["error"]["param"]) == (400, "messages[0].content[1]")
    assert "text only" in body["error"]["message"]


async def test_tools_are_refused_by_name_while_they_are_not_served(http: aiohttp.ClientSession) -> None:
    status, body = await post(http, {"messages": MESSAGES, "tools": [{"type": "function"}]})
    assert (status, body["error"]["param"], body["error"]["code"]) == (400, "tools", "unsupported_parameter")


@pytest.mark.parametrize(
    ("method", "path", "status"), [("GET", CHAT, 405), ("GET", "/v1/nothing", 404), ("POST", "/v1/models", 405)]
)
async def test_unknown_paths_and_methods_are_answered_in_openais_form(
    http: aiohttp.ClientSession, method: str, path: str, status: int
) -> None:
    async with http.request(method, path) as response:
        assert response.status == status
        assert set((await response.json())["error"]) == {"message", "type", "param", "code"}
        assert response.headers["X-Request-Id"]


@pytest.mark.parametrize(("given", "kept"), [("abc-1.2:3_4", True), ("with space", False), ("x" * 200, False)])
async def test_a_valid_request_id_is_kept_and_another_one_is_replaced(
    http: aiohttp.ClientSession, given: str, kept: bool
) -> None:
    async with http.get("/v1/models", headers={"X-Request-Id": given}) as response:
        assert (response.headers["X-Request-Id"] == given) is kept


async def test_a_drain_refuses_new_requests_finishes_the_open_and_exits_clean(tokenizer: ScriptedTokenizer) -> None:
    may_end = asyncio.Event()

    async def script(stream: ScriptedStream) -> None:
        stream.say("on")
        await may_end.wait()
        await answer_end(stream)

    tokenizer.script = script
    async with (
        running_gateway(f"127.0.0.1:{tokenizer.port}", drain_timeout_s=5.0) as gateway,
        aiohttp.ClientSession(gateway.url) as http,
    ):
        open_one = asyncio.create_task(events_of(http))
        await wait_until(lambda: tokenizer.opened)
        gateway.runtime.request_drain()
        await wait_until(lambda: not gateway.runtime.ready)
        status, body = await post(http, {"messages": MESSAGES})
        assert (status, body["error"]["code"]) == (503, "draining")
        may_end.set()
        assert (await open_one)[-1] == "[DONE]"
    assert gateway.exit_code == 0


async def test_past_the_drains_bound_a_stream_ends_with_an_error_event_and_no_cut(tokenizer: ScriptedTokenizer) -> None:
    async def script(stream: ScriptedStream) -> None:
        stream.say("on")

    tokenizer.script = script
    async with (
        running_gateway(f"127.0.0.1:{tokenizer.port}", drain_timeout_s=0.2) as gateway,
        aiohttp.ClientSession(gateway.url) as http,
    ):
        open_one = asyncio.create_task(events_of(http))
        await wait_until(lambda: tokenizer.opened)
        gateway.stop.set()
        events = await open_one
    assert json.loads(events[-1])["error"]["code"] == "aborted"
    assert gateway.exit_code == 0
    await wait_until(lambda: [end for _, end in tokenizer.releases] == [2])


async def answer_end(stream: ScriptedStream) -> None:
    stream.finish()
    stream.complete()


async def connection(gateway: RunningGateway) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    return await asyncio.open_connection("127.0.0.1", gateway.gateway.http_port)


def request_bytes(body: dict[str, Any]) -> bytes:
    data = json.dumps(body).encode()
    return b"POST %b HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (CHAT.encode(), len(data), data)


async def raw_exchange(gateway: RunningGateway, body: dict[str, Any]) -> bytes:
    """All bytes until the server closes the connection."""
    reader, writer = await connection(gateway)
    writer.write(request_bytes(body))
    raw = await asyncio.wait_for(reader.read(), 5)
    writer.close()
    return raw
