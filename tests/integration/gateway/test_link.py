"""The link to tokenizers: lost, silent, restarted, unfit, several."""

from __future__ import annotations

import asyncio

import aiohttp
import pytest
from openai import APIError

from services.protocol.events import FinishReason
from tests.integration.gateway.running_gateway import RunningGateway, running_gateway, wait_until
from tests.integration.gateway.servicer import MODEL, ScriptedStream, ScriptedTokenizer, serving
from tests.integration.gateway.test_openai_client import MESSAGES

DELIVERED, CALLER_GONE = 1, 2


async def test_an_event_call_that_ends_is_opened_again_and_its_replay_is_not_sent_twice(
    gateway: RunningGateway, tokenizer: ScriptedTokenizer
) -> None:
    again = asyncio.Event()

    async def script(stream: ScriptedStream) -> None:
        stream.say("one ")
        stream.say("two ")
        await again.wait()
        stream.say("three")
        stream.finish()
        stream.complete()

    tokenizer.script = script
    async with gateway.openai() as client:
        stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
        text = ""
        async for chunk in stream:
            text += chunk.choices[0].delta.content or ""
            if text == "one two " and tokenizer.calls == 1:
                tokenizer.hang_up()
                await wait_until(lambda: tokenizer.calls == 2 and gateway.runtime.ready)
                again.set()
    assert text == "one two three"


async def test_a_replay_that_differs_ends_that_stream_with_an_integrity_error(
    gateway: RunningGateway, tokenizer: ScriptedTokenizer
) -> None:
    async def script(stream: ScriptedStream) -> None:
        stream.say("abc")
        stream.say("X", at=(0, 0))

    tokenizer.script = script
    async with gateway.openai() as client:
        with pytest.raises(APIError) as failure:
            async for _ in await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True):
                pass
    assert failure.value.code == "integrity"
    await wait_until(lambda: tokenizer.releases == [(1, CALLER_GONE)])


async def test_a_restarted_tokenizer_costs_its_streams_an_error_and_new_ones_nothing(
    gateway: RunningGateway, tokenizer: ScriptedTokenizer
) -> None:
    async def script(stream: ScriptedStream) -> None:
        stream.say("some")

    default, tokenizer.script = tokenizer.script, script
    async with gateway.openai() as client:
        stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
        chunks = [await anext(stream), await anext(stream)]
        assert chunks[-1].choices[0].delta.content == "some"
        await tokenizer.restart()
        with pytest.raises(APIError) as failure:
            await anext(stream)
        assert failure.value.code == "stream_cut"
        tokenizer.script = default
        await wait_until(lambda: gateway.runtime.ready)
        answer = await client.chat.completions.create(model=MODEL, messages=MESSAGES)
    assert answer.choices[0].message.content == "Hello world"


async def test_a_silent_tokenizer_is_suspect_after_two_seconds_and_ready_says_why(
    gateway: RunningGateway, tokenizer: ScriptedTokenizer, http: aiohttp.ClientSession
) -> None:
    tokenizer.heartbeats = False
    started = asyncio.get_running_loop().time()
    await wait_until(lambda: not gateway.runtime.ready)
    assert 1.0 < asyncio.get_running_loop().time() - started < 3.5
    async with http.get("/ready") as response:
        assert response.status == 503
        assert "silent" in (await response.json())["why"]
    async with http.get("/health") as response:
        assert response.status == 200
    tokenizer.heartbeats = True
    await wait_until(lambda: gateway.runtime.ready)


async def test_a_tokenizer_without_a_route_takes_no_requests_and_ready_says_why(
    gateway: RunningGateway, tokenizer: ScriptedTokenizer, http: aiohttp.ClientSession
) -> None:
    tokenizer.why_not = "scheduler: the model is being loaded"
    tokenizer.hang_up()
    await wait_until(lambda: tokenizer.why_not in gateway.gateway.router.why_not)
    async with http.get("/ready") as response:
        assert response.status == 503
        assert tokenizer.why_not in (await response.json())["why"]
    async with http.post("/v1/chat/completions", json={"messages": MESSAGES}) as response:
        assert response.status == 503
    assert not tokenizer.opened
    tokenizer.why_not = ""
    tokenizer.hang_up()
    await wait_until(lambda: gateway.runtime.ready)


async def test_without_a_tokenizer_a_request_is_refused_as_unavailable_with_a_hint() -> None:
    async with (
        running_gateway("127.0.0.1:1", ready=False) as gateway,
        aiohttp.ClientSession(gateway.url) as http,
        http.post("/v1/chat/completions", json={"messages": MESSAGES}) as response,
    ):
        assert response.status == 503
        assert int(response.headers["Retry-After"]) >= 1
        error = (await response.json())["error"]
        assert error["code"] == "no_tokenizer"
        assert "127.0.0.1:1" in error["message"]


async def test_a_tokenizer_of_another_protocol_is_not_ready_and_the_difference_is_named() -> None:
    async with (
        serving(ScriptedTokenizer(protocol_version=9)) as stranger,
        running_gateway(f"127.0.0.1:{stranger.port}", ready=False) as gateway,
        aiohttp.ClientSession(gateway.url) as http,
    ):
        await wait_until(lambda: "protocol version 9" in gateway.runtime.not_ready_why)
        async with http.get("/ready") as response:
            assert response.status == 503


async def test_requests_go_where_the_fewest_are_open(tokenizer: ScriptedTokenizer) -> None:
    async with (
        serving(ScriptedTokenizer()) as second,
        running_gateway(f"127.0.0.1:{tokenizer.port}", f"127.0.0.1:{second.port}") as gateway,
        aiohttp.ClientSession(gateway.url) as http,
    ):
        tokenizer.script = second.script = hold
        await wait_until(lambda: all(link.ready for link in gateway.gateway.router.links))
        calls = [asyncio.create_task(_post(http)) for _ in range(6)]
        await wait_until(lambda: len(tokenizer.opened) + len(second.opened) == 6)
        for call in calls:
            call.cancel()
        assert (len(tokenizer.opened), len(second.opened)) == (3, 3)


async def test_a_tokenizer_with_another_model_gets_no_requests(tokenizer: ScriptedTokenizer) -> None:
    other = ScriptedTokenizer(model="other")
    async with serving(other):
        pass  # it has a port now, and comes up when the first is ready
    async with (
        running_gateway(f"127.0.0.1:{tokenizer.port}", f"127.0.0.1:{other.port}") as gateway,
        serving(other),
        aiohttp.ClientSession(gateway.url) as http,
    ):
        link = gateway.gateway.router.links[1]
        await wait_until(lambda: "serves model 'other'" in link.why)
        for _ in range(4):
            assert await _post(http) == 200
    assert len(tokenizer.opened) == 4


async def test_each_delivered_stream_is_released_once(gateway: RunningGateway, tokenizer: ScriptedTokenizer) -> None:
    async def script(stream: ScriptedStream) -> None:
        stream.finish(FinishReason.LENGTH)
        stream.complete()

    tokenizer.script = script
    async with gateway.openai() as client:
        for _ in range(5):
            await client.chat.completions.create(model=MODEL, messages=MESSAGES)
    await wait_until(lambda: len(tokenizer.releases) == 5)
    assert tokenizer.releases == [(number, DELIVERED) for number in range(1, 6)]


async def hold(stream: ScriptedStream) -> None:
    """Says nothing until its caller is gone."""
    await stream.released.wait()


async def _post(http: aiohttp.ClientSession) -> int:
    async with http.post("/v1/chat/completions", json={"messages": MESSAGES}) as response:
        return response.status
