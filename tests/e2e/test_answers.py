"""Many different requests at once: what is streamed is what would have been answered whole, to the last token."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import aiohttp
import orjson

from tailrace.client import Answer, Client, FinishReason, Stream
from tests.stack import Stack

STREAMS = 64


def options_of(rng: random.Random) -> dict[str, Any]:
    """Options of every kind, with a seed, so that asking again gives the same answer."""
    options: dict[str, Any] = {
        "seed": rng.getrandbits(64),
        "max_tokens": rng.randint(1, 80),
        "n": rng.choice((1, 1, 2, 3)),
    }
    choices: list[tuple[float, dict[str, Any]]] = [
        (0.4, {"stop": rng.sample(["e", "th", " a", "\n", "ing", "é", "."], 2)}),
        (0.2, {"include_stop_in_output": True}),
        (0.2, {"stop_token_ids": [rng.randrange(49152) for _ in range(8)]}),
        (0.3, {"logprobs": rng.randint(0, 3)}),
        (0.2, {"token_info": True}),
        (0.2, {"ignore_eos": True}),
        (0.2, {"skip_special_tokens": False}),
        (0.2, {"min_tokens": 1}),
        (0.2, {"temperature": 0.0}),
        (0.2, {"top_p": 0.9, "top_k": 40, "min_p": 0.01}),
    ]
    for share, option in choices:
        options |= option if rng.random() < share else {}
    return options


def ask(client: Client, number: int, **how: Any) -> Stream:
    """Request `number`, the same one every time; `how` may differ."""
    rng = random.Random(number)
    options = options_of(rng) | how
    match number % 3:
        case 0:
            return client.generate(f"The river {number}", **options)
        case 1:
            return client.generate([rng.randrange(17, 49152) for _ in range(rng.randint(1, 300))], **options)
        case _:
            return client.chat([{"role": "user", "content": f"Tell me of river {number}."}], **options)


def assert_adds_up(answer: Answer) -> None:
    """Ids, token infos, finishes and usage tell the same numbers."""
    assert answer.usage.prompt_tokens == answer.started.prompt_tokens
    assert answer.usage.output_tokens == sum(choice.finish.output_tokens for choice in answer.choices)
    for choice in answer.choices:
        assert choice.finish.reason in (FinishReason.STOP, FinishReason.LENGTH)
        assert len(choice.token_ids) == choice.finish.output_tokens
        assert not choice.tokens or [token.token_id for token in choice.tokens] == choice.token_ids


async def test_64_mixed_streams_at_once_join_to_what_a_single_response_says(stack: Stack, client: Client) -> None:
    streamed = await asyncio.gather(*(ask(client, number).whole() for number in range(STREAMS)))
    single = await asyncio.gather(*(ask(client, number, whole=True).whole() for number in range(STREAMS)))
    for ours, theirs in zip(streamed, single, strict=True):
        assert ours.choices == theirs.choices
        assert ours.usage.output_tokens == theirs.usage.output_tokens
        assert_adds_up(ours)
    assert any(choice.finish.reason is FinishReason.STOP for answer in streamed for choice in answer.choices)
    assert any(choice.tokens for answer in streamed for choice in answer.choices)
    await stack.wait_idle()


async def test_sse_and_grpc_and_a_single_http_response_say_the_same(stack: Stack, client: Client) -> None:
    body = {
        "model": stack.model,
        "messages": [{"role": "user", "content": "Which river?"}],
        "max_tokens": 60,
        "seed": 5,
    }
    whole = await client.chat(body["messages"], max_tokens=60, seed=5).whole()
    async with aiohttp.ClientSession(stack.url) as session:
        async with session.post("/v1/chat/completions", json=body) as response:
            single = await response.json()
        streaming = {**body, "stream": True, "stream_options": {"include_usage": True}}
        async with session.post("/v1/chat/completions", json=streaming) as response:
            text = (await response.read()).decode()
    *chunks, done, rest = text.split("\n\n")
    assert (done.partition("data: ")[2], rest) == ("[DONE]", "")
    parsed = [orjson.loads(chunk.partition("data: ")[2]) for chunk in chunks]
    pieces = [choice["delta"].get("content", "") for chunk in parsed for choice in chunk["choices"]]
    reasons = [choice["finish_reason"] for chunk in parsed for choice in chunk["choices"]]
    assert "".join(pieces) == whole.choices[0].text == single["choices"][0]["message"]["content"]
    assert [reason for reason in reasons if reason] == ["length"]
    assert parsed[-1]["usage"] == single["usage"]
    assert single["usage"]["completion_tokens"] == whole.usage.output_tokens == 60


async def test_the_same_request_alone_and_in_company_gives_the_same_answer(client: Client) -> None:
    alone = await ask(client, 7).whole()
    company = [asyncio.create_task(ask(client, number).whole()) for number in range(20)]
    assert (await ask(client, 7).whole()).choices == alone.choices
    await asyncio.gather(*company)
