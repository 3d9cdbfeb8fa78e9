"""The embedded model behind real processes: sensible text through every door."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio

from tailrace.client import Client, Completed, Delta, InvalidRequest
from tests.stack import Stack, process_stack

QUESTION = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
MIB = 1 << 20

WORD = " responsibilities"  # one token, so that even megabytes of it are quickly encoded

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(model_directory: Path) -> AsyncIterator[Stack]:
    """Four processes, as `tailrace up` starts them; loading the model takes seconds, so all tests here share it."""
    async with process_stack(model_directory, "--threads", "1", fake_engine=False) as running:
        yield running


@pytest_asyncio.fixture(loop_scope="module")
async def client(stack: Stack) -> AsyncIterator[Client]:
    async with Client(stack.grpc, timeout_s=60) as connected:
        yield connected


async def test_the_openai_client_streams_a_sensible_answer(stack: Stack) -> None:
    async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none") as api:
        options: dict[str, Any] = {"model": stack.model, "messages": QUESTION, "temperature": 0, "max_tokens": 30}
        stream = await api.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})
        chunks = [chunk async for chunk in stream]
        whole = await api.chat.completions.create(**options)
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert "Paris" in text
    assert whole.choices[0].message.content == text
    assert len([chunk for chunk in chunks for choice in chunk.choices if choice.delta.content]) > 3
    # The second one finds its prompt in the prefix cache; all else that it cost is the same.
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens


async def test_grpc_gives_the_same_greedy_answer_alone_and_in_company(client: Client) -> None:
    alone = await client.chat(QUESTION, temperature=0, max_tokens=16).text()
    company = [client.generate(f"Number {number} is", max_tokens=16, seed=number).text() for number in range(6)]
    together = await asyncio.gather(client.chat(QUESTION, temperature=0, max_tokens=16).text(), *company)
    assert "Paris" in alone
    assert together[0] == alone


async def test_the_models_probabilities_come_with_each_tokens_bytes_on_grpc_and_in_openais_form(
    stack: Stack, client: Client
) -> None:
    options: dict[str, Any] = {"temperature": 0, "max_tokens": 12}
    (choice,) = (await client.chat(QUESTION, **options, logprobs=3).whole()).choices
    assert b"".join(token.bytes for token in choice.tokens) == choice.text.encode()
    assert [token.token_id for token in choice.tokens] == choice.token_ids
    for token in choice.tokens:
        values = [top.logprob for top in token.top]
        assert len(values) == 3
        assert values == sorted(values, reverse=True)
        assert (token.token_id, token.logprob) == (token.top[0].token_id, values[0]), "greedy: the likeliest"
        assert sum(map(math.exp, values)) <= 1.0001
    async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none") as api:
        answer = await api.chat.completions.create(
            model=stack.model, messages=QUESTION, **options, logprobs=True, top_logprobs=3
        )
    content = (answer.choices[0].logprobs and answer.choices[0].logprobs.content) or []
    assert [bytes(entry.bytes or ()) for entry in content] == [token.bytes for token in choice.tokens]
    assert [entry.logprob for entry in content] == pytest.approx([token.logprob for token in choice.tokens], abs=1e-4)
    assert [[bytes(top.bytes or ()) for top in entry.top_logprobs] for entry in content] == [
        [top.bytes for top in token.top] for token in choice.tokens
    ]


async def test_a_prompts_probabilities_come_by_echo_in_openais_form_and_are_those_of_grpc(
    stack: Stack, client: Client
) -> None:
    prompt = "The capital of France is Paris"
    stream = client.generate(prompt, temperature=0, max_tokens=1, prompt_logprobs=2)
    (told,) = [event.prompt async for event in stream if isinstance(event, Completed)]
    async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="none") as api:
        answer = await api.completions.create(
            model=stack.model, prompt=prompt, temperature=0, max_tokens=1, echo=True, logprobs=2
        )
    (choice,) = answer.choices
    assert choice.text.startswith(prompt)
    assert choice.logprobs is not None
    assert choice.logprobs.token_logprobs is not None
    scored = choice.logprobs.token_logprobs[: len(told)]
    assert scored[0] is None
    assert scored[1:] == pytest.approx([token.logprob for token in told[1:]], abs=1e-4)
    offsets, tokens = choice.logprobs.text_offset or [], choice.logprobs.tokens or []
    assert all(choice.text[at:].startswith(token) for at, token in zip(offsets, tokens, strict=True))


async def test_an_emoji_that_the_model_writes_in_two_tokens_comes_whole_and_each_token_has_its_bytes(
    client: Client,
) -> None:
    prompt = "I am so happy 😊 I am so happy 😊 I am so happy"
    stream = client.generate(prompt, temperature=0, max_tokens=12, logprobs=1)
    deltas = [event async for event in stream if isinstance(event, Delta)]
    text = "".join(delta.text for delta in deltas)
    pieces = [token.bytes for delta in deltas for token in delta.tokens]
    assert b"".join(pieces) == text.encode()
    assert "😊" in text
    assert "\ufffd" not in text
    assert " 😊".encode() not in pieces, "no token holds it whole"


def text_of(size: int) -> str:
    return (WORD * (size // len(WORD) + 1))[:size]


async def test_messages_around_4_mib_pass_every_hop_both_ways(client: Client) -> None:
    text = text_of(4 * MIB)
    tokens = await client.tokenize(text)
    assert b"".join(tokens.token_bytes) == text.encode()
    with pytest.raises(InvalidRequest):
        await client.tokenize(text + "!")


@pytest.mark.parametrize("size", [4 * MIB - 1, 4 * MIB, 4 * MIB + 1])
async def test_a_prompt_around_4_mib_is_refused_by_its_length_and_nothing_breaks(client: Client, size: int) -> None:
    with pytest.raises(InvalidRequest) as refused:
        await client.generate(text_of(size)).text()
    assert refused.value.field == "text"


async def test_nothing_is_left_when_idle(stack: Stack) -> None:
    await stack.wait_idle()
