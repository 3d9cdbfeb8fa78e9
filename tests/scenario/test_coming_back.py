"""Callers who leave and come back through the gateway, over gRPC and HTTP: exactly the rest, and one run for all."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from tailrace.client import AbortOutcome, AlreadyExists, Answer, Client, Completed, Delta, Event, Handle, NotFound
from tests.integration.tokenizer.tiny_model import write_tiny_model
from tests.stack import Stack, in_process_stack

TOKENS = 60
ENGINE = {"fake_first_id": 34, "fake_end_id": 90, "fake_pace_ms": 2.0}
KEYS = '[tenants.alice]\nkeys = ["a"]\n[tenants.bob]\nkeys = ["b"]\n'


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
async def stack(model: Path) -> AsyncIterator[Stack]:
    async with in_process_stack(model, scheduler=ENGINE) as running:
        yield running


@pytest.fixture
async def client(stack: Stack) -> AsyncIterator[Client]:
    """It never comes back by itself: that is what the tests do."""
    async with Client(stack.grpc, resume_for_s=0) as connected:
        yield connected


def asked(number: int) -> dict[str, Any]:
    return {"max_tokens": TOKENS, "ignore_eos": True, "seed": number, "n": 1 + number % 3}


class Reader:
    """Reads one answer over any number of streams; what it has is its own, and so is where it says it stands."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.texts = [""] * n
        self.ids: list[list[int]] = [[] for _ in range(n)]
        self.stands = [[(0, 0)] for _ in range(n)]
        self.completed: Completed | None = None

    def take(self, event: Event) -> None:
        match event:
            case Delta(choice=choice):
                self.texts[choice] += event.text
                self.ids[choice] += event.token_ids
                self.stands[choice].append((event.next_token_offset, event.next_text_offset))
            case Completed():
                self.completed = event
            case _:
                pass

    def rewind(self, handle: Handle, chance: random.Random) -> Handle:
        """Forgets some of what it has, back to where some delta ended."""
        offsets = []
        for choice in range(self.n):
            kept = chance.randint(0, len(self.stands[choice]) - 1)
            del self.stands[choice][kept + 1 :]
            tokens, text = self.stands[choice][-1]
            self.ids[choice], self.texts[choice] = self.ids[choice][:tokens], self.texts[choice][:text]
            offsets.append((tokens, text))
        return Handle(handle.request_id, handle.resume_token, offsets)


async def test_a_hundred_who_leave_and_come_back_at_random_offsets_have_the_undisturbed_answers(
    stack: Stack, client: Client
) -> None:
    undisturbed = await asyncio.gather(*(client.generate("p", **asked(number)).whole() for number in range(25)))
    disturbed = await asyncio.gather(*(_leave_four_times(client, number) for number in range(25)))
    for whole, reader in zip(undisturbed, disturbed, strict=True):
        assert reader.texts == [choice.text for choice in whole.choices]
        assert reader.ids == [choice.token_ids for choice in whole.choices]
        assert reader.completed == Completed(whole.usage)
    assert stack.metric("gateway", "resumes_total", transport="grpc", outcome="resumed") == 100
    assert stack.metric("gateway", "integrity_errors_total") == 0
    await stack.wait_idle()


async def _leave_four_times(client: Client, number: int) -> Reader:
    chance, reader = random.Random(number), Reader(asked(number)["n"])
    stream = client.generate("p", detach=True, retain_s=5, **asked(number))
    handle = None
    for _ in range(4):
        left = chance.randint(0, TOKENS)
        async for event in stream:
            reader.take(event)
            left -= 1
            if left < 0:
                break
        handle = stream.handle
        assert handle is not None
        stream.cancel()
        stream = client.resume(reader.rewind(handle, chance))
    async for event in stream:
        reader.take(event)
    assert handle is not None
    assert await client.abort(handle.request_id) is AbortOutcome.ALREADY_FINISHED
    return reader


async def test_over_http_the_rest_after_a_disconnect_is_exact_too(stack: Stack, client: Client) -> None:
    whole = await asyncio.gather(*(client.generate("p", **asked(3 * number)).text() for number in range(12)))
    async with aiohttp.ClientSession(stack.url) as http:
        got = await asyncio.gather(*(_leave_over_http(http, 3 * number) for number in range(12)))
    assert got == whole


async def _leave_over_http(http: aiohttp.ClientSession, number: int) -> str:
    chance, text, event_id, done = random.Random(number), "", "", False
    body = {"prompt": "p", "stream": True, "on_disconnect": "detach", "retain_ms": 30_000, **asked(number)}
    request = http.post("/v1/completions", json=body)
    for visit in range(4):
        left = 10_000 if visit == 3 else chance.randint(0, 20)
        async with request as response:
            assert response.status == 200
            request_id = response.headers["X-Request-Id"]
            event_id = event_id or response.headers["X-Resume-From"]
            while left and (line := await response.content.readline()):
                left -= line == b"\n"
                name, _, value = line.rstrip(b"\n").partition(b": ")
                if name == b"id":
                    event_id = value.decode()
                elif value == b"[DONE]":
                    done = True
                elif name == b"data":
                    text += json.loads(value)["choices"][0]["text"]
        if done:
            break
        request = http.get(f"/v1/requests/{request_id}/events", headers={"Last-Event-ID": event_id})
    assert done
    return text


async def test_fifty_equal_generates_at_once_are_one_run_and_fifty_equal_streams(stack: Stack, client: Client) -> None:
    # Kept for a while, or who is slow to ask would find it over and begin it anew.
    options = {**asked(1), "request_id": "one", "retain_s": 5}
    answers: list[Answer] = await asyncio.gather(*(client.generate("p", **options).whole() for _ in range(50)))
    assert all(answer == answers[0] for answer in answers)
    assert stack.metric("tokenizer", "accepted_total") == 1
    with pytest.raises(AlreadyExists):
        await asyncio.gather(*(client.generate(prompt, **options).whole() for prompt in ("p", "other")))
    await stack.wait_idle()


async def test_fifty_equal_posts_with_one_key_are_one_run(stack: Stack) -> None:
    body = {"prompt": "p", "retain_ms": 5000, **asked(0)}
    async with aiohttp.ClientSession(stack.url, headers={"Idempotency-Key": "order 7"}) as http:

        async def post(**more: Any) -> tuple[int, Any]:
            async with http.post("/v1/completions", json={**body, **more}) as response:
                return response.status, await response.json()

        answers = await asyncio.gather(*(post() for _ in range(50)), post(seed=99))
    assert all(answer == answers[0] for answer in answers[:-1])
    assert answers[0][0] == 200
    status, refusal = answers[-1]
    assert (status, refusal["error"]["code"]) == (409, "already_exists")
    assert stack.metric("tokenizer", "accepted_total") == 1


async def test_only_the_tenant_that_opened_a_request_can_resume_or_abort_it(model: Path, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(KEYS, encoding="utf-8")
    async with (
        in_process_stack(model, scheduler=ENGINE, gateway={"api_keys_file": keys}) as stack,
        Client(stack.grpc, api_key="a") as alice,
        Client(stack.grpc, api_key="b") as bob,
        aiohttp.ClientSession(stack.url, headers={"Authorization": "Bearer b"}) as bobs_http,
    ):
        stream = alice.generate("p", request_id="hers", detach=True, retain_s=30, **asked(0))
        async for event in stream:
            if isinstance(event, Delta):
                break
        handle = stream.handle
        assert handle is not None
        stream.cancel()
        with pytest.raises(NotFound):
            await bob.resume(handle).whole()
        assert await bob.abort("hers") is AbortOutcome.NOT_FOUND
        async with bobs_http.delete("/v1/requests/hers") as response:
            assert response.status == 404
        # The same id is bob's own when he uses it, and leaves hers alone.
        await bob.generate("p", request_id="hers", max_tokens=2).whole()
        for token in (b"", b"x" * 16):
            with pytest.raises(NotFound):
                await alice.resume(Handle("hers", token, handle.offsets)).whole()
        rest = await alice.resume(handle).whole()
        assert rest.choices[0].finish.output_tokens == TOKENS
        assert await alice.abort("hers") is AbortOutcome.ALREADY_FINISHED
