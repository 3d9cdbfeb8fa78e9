"""The official client is the judge."""

from __future__ import annotations

from typing import Any

from tests.integration.gateway.running_gateway import RunningGateway
from tests.integration.gateway.servicer import MODEL

MESSAGES: Any = [{"role": "user", "content": "hi"}]


async def test_chat_streams_the_text_the_role_once_and_one_finish(gateway: RunningGateway) -> None:
    async with gateway.openai() as client:
        stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
        chunks = [chunk async for chunk in stream]
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "Hello world"
    assert [chunk.choices[0].delta.role for chunk in chunks if chunk.choices[0].delta.role] == ["assistant"]
    assert [chunk.choices[0].finish_reason for chunk in chunks][-1] == "stop"
    assert {chunk.choices[0].finish_reason for chunk in chunks[:-1]} == {None}


async def test_chat_not_streamed_gives_the_same_text_with_usage(gateway: RunningGateway) -> None:
    async with gateway.openai() as client:
        answer = await client.chat.completions.create(model=MODEL, messages=MESSAGES)
    assert answer.choices[0].message.content == "Hello world"
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (7, 3, 10)
