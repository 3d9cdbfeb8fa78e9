"""Structured output at the caller: through all four services, over HTTP and gRPC, with the fake engine."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import grpc
import grpc.aio
import pytest
import pytest_asyncio

from services.runtime.errors import InvalidRequest, from_rpc_error
from tailrace.v1 import common_pb2, generation_pb2, generation_pb2_grpc
from tests.integration.tokenizer.tiny_model import write_tiny_model
from tests.stack import Stack, in_process_stack

pytestmark = pytest.mark.asyncio(loop_scope="module")

COLOUR = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}, "level": {"type": "integer", "minimum": 0, "maximum": 9}},
    "required": ["colour", "level"],
    "additionalProperties": False,
}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "colour", "strict": True, "schema": COLOUR}}


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def stack(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Stack]:
    async with in_process_stack(write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")) as running:
        yield running


async def complete(stack: Stack, **parameters: Any) -> tuple[int, dict[str, Any]]:
    """Status and body of a completion."""
    body = {"model": stack.model, "prompt": "a prompt", "max_tokens": 100, **parameters}
    async with aiohttp.ClientSession() as session, session.post(f"{stack.url}/v1/completions", json=body) as response:
        return response.status, await response.json()


async def streamed(stack: Stack, **parameters: Any) -> tuple[str, str]:
    """Text and finish reason of a streamed completion."""
    body = {"model": stack.model, "prompt": "a prompt", "max_tokens": 100, "stream": True, **parameters}
    text, reason = "", ""
    async with aiohttp.ClientSession() as session, session.post(f"{stack.url}/v1/completions", json=body) as response:
        async for line in response.content:
            if line.startswith(b"data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    text += choice["text"]
                    reason = choice["finish_reason"] or reason
    return text, reason


@pytest.mark.parametrize("given", [{"response_format": SCHEMA}, {"guided_json": COLOUR}], ids=["openai", "guided"])
async def test_an_answer_is_json_of_its_schema(stack: Stack, given: dict[str, Any]) -> None:
    status, body = await complete(stack, seed=4, **given)
    assert status == 200, body
    (choice,) = body["choices"]
    answer = json.loads(choice["text"])
    assert answer["colour"] in ("red", "green")
    assert 0 <= answer["level"] <= 9
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("given", "texts"),
    [
        ({"guided_choice": ["left", "right"]}, {"left", "right"}),
        ({"guided_regex": "[ab]"}, {"a", "b"}),
        ({"guided_grammar": 'start: "x" | "y"'}, {"x", "y"}),
    ],
    ids=["choice", "regex", "grammar"],
)
async def test_an_answer_is_one_of_what_may_be(stack: Stack, given: dict[str, Any], texts: set[str]) -> None:
    _, body = await complete(stack, n=3, **given)
    assert {choice["text"] for choice in body["choices"]} <= texts
    assert {choice["finish_reason"] for choice in body["choices"]} == {"stop"}


async def test_any_json_object_and_plain_text(stack: Stack) -> None:
    _, body = await complete(stack, response_format={"type": "json_object"}, max_tokens=40)
    assert body["choices"][0]["text"].startswith("{")
    status, _ = await complete(stack, response_format={"type": "text"})
    assert status == 200


@pytest.mark.parametrize("max_tokens", [5, 100])
async def test_17_streamed_and_whole_are_the_same_and_cut_is_told_as_length(stack: Stack, max_tokens: int) -> None:
    _, body = await complete(stack, seed=4, response_format=SCHEMA, max_tokens=max_tokens)
    (choice,) = body["choices"]
    text, reason = await streamed(stack, seed=4, response_format=SCHEMA, max_tokens=max_tokens)
    assert (text, reason) == (choice["text"], choice["finish_reason"])
    assert reason == ("stop" if max_tokens == 100 else "length")


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "x"}}}}, "response_format"),
        ({"guided_json": '{"type": '}, "guided_json"),
        ({"guided_json": {"enum": ["x" * 70_000]}}, "guided_json"),
        ({"guided_regex": "(a"}, "guided_regex"),
        ({"guided_choice": []}, "guided_choice"),
        ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
        ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos"),
    ],
)
async def test_16_what_is_wrong_is_refused_with_its_parameter(stack: Stack, given: dict[str, Any], param: str) -> None:
    status, body = await complete(stack, **given)
    assert status == 400, body
    assert body["error"]["param"] == param
    await stack.wait_idle()


async def test_over_grpc_a_wrong_schema_is_an_invalid_argument_that_names_its_field(stack: Stack) -> None:
    options = generation_pb2.GenerationOptions(constraint=common_pb2.Constraint(json_schema='{"type": "x"}'))
    async with grpc.aio.insecure_channel(stack.grpc) as channel:
        call: Any = generation_pb2_grpc.GenerationServiceStub(channel).Generate(
            generation_pb2.GenerateRequest(text="a", options=options)
        )
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call.read()
    error = from_rpc_error(refused.value)
    assert isinstance(error, InvalidRequest)
    assert error.field == "options.constraint.json_schema"
    assert "Invalid type: x" in error.reason_text
