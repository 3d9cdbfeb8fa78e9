"""Prompt logprobs at the caller, through tokenizer, scheduler (fake engine) and detokenizer."""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio
import pytest

from services.runtime.errors import InvalidRequest, from_rpc_error
from tailrace.v1 import common_pb2, generation_pb2
from tests.integration.tokenizer.test_real_services import Services, services

__all__ = ["services"]  # a fixture

Options = generation_pb2.GenerationOptions


async def completed(services: Services, text: str, **changes: Any) -> generation_pb2.Completed:
    output = generation_pb2.OutputOptions(prompt_logprobs=2)
    options = Options(output=output, stopping=common_pb2.StopConditions(max_tokens=3), **changes)
    call: Any = services.generation.Generate(generation_pb2.GenerateRequest(text=text, options=options))
    events = [event async for event in call]
    done: generation_pb2.Completed = events[-1].completed
    return done


async def test_completed_tells_every_token_of_the_prompt_and_all_but_the_first_have_a_logprob(
    services: Services,
) -> None:
    text = "a prompt of more than one block"
    first, again = await completed(services, text), await completed(services, text, n=2)
    assert b"".join(token.bytes for token in first.prompt[1:]).decode() == text
    assert [token.HasField("logprob") for token in first.prompt] == [False] + [True] * len(text)
    assert all(len(token.top) == 2 for token in first.prompt[1:])
    assert list(first.prompt) == list(again.prompt)
    await services.until_idle()


async def test_more_than_a_message_can_carry_is_refused_by_name(services: Services) -> None:
    options = Options(output=generation_pb2.OutputOptions(prompt_logprobs=21))
    call: Any = services.generation.Generate(generation_pb2.GenerateRequest(text="a", options=options))
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call.read()
    error = from_rpc_error(refused.value)
    assert isinstance(error, InvalidRequest)
    assert error.field == "options.output.prompt_logprobs"
