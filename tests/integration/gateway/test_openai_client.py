"""The official client is the judge."""

from __future__ import annotations

import asyncio
from typing import Any

import openai
import pytest

from services.protocol.events import FinishReason
from services.runtime.errors import InvalidRequest, Overloaded, Unavailable
from tailrace.v1 import common_pb2
from tests.integration.gateway.running_gateway import RunningGateway, wait_until
from tests.integration.gateway.servicer import MODEL, ScriptedStream, ScriptedTokenizer

MESSAGES: Any = [{"role": "user", "content": "hi"}]


def info(token_id: int, token: bytes) -> common_pb2.TokenInfo:
    top = [common_pb2.TopLogprob(token_id=token_id, logprob=-0.25, bytes=token)]
    return common_pb2.TokenInfo(token_id=token_id, logprob=-0.25, bytes=token, top=top)


async def with_logprobs(stream: ScriptedStream) -> None:
    """A check mark whose bytes come in two tokens."""
    stream.say("", ids=[], infos=[])
    stream.say("✅", ids=[1, 2], infos=[info(1, b"\xe2\x9c"), info(2, b"\x85")])
    stream.say("!", ids=[3], infos=[info(3, b"!")])
    stream.finish()
    stream.complete()


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


async def test_the_synchronous_client_streams_too(gateway: RunningGateway) -> None:
    def stream() -> str:
        with openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="unused", max_retries=0) as client:
            chunks = client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
            return "".join(chunk.choices[0].delta.content or "" for chunk in chunks)

    assert await asyncio.to_thread(stream) == "Hello world"


async def test_the_clients_own_accumulator_puts_the_answer_together(gateway: RunningGateway) -> None:
    async with (
        gateway.openai() as client,
        client.chat.completions.stream(model=MODEL, messages=MESSAGES, n=2) as stream,
    ):
        answer = await stream.get_final_completion()
    assert [choice.message.content for choice in answer.choices] == ["Hello world"] * 2
    assert [choice.finish_reason for choice in answer.choices] == ["stop"] * 2


async def test_usage_comes_once_last_with_no_choices_and_equals_the_other_form_summed_over_n(
    gateway: RunningGateway,
) -> None:
    async with gateway.openai() as client:
        stream = await client.chat.completions.create(
            model=MODEL, messages=MESSAGES, n=3, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        whole = await client.chat.completions.create(model=MODEL, messages=MESSAGES, n=3)
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].choices == []
    assert chunks[-1].usage == whole.usage
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 9


async def test_completions_streamed_and_whole_give_the_same(gateway: RunningGateway) -> None:
    async with gateway.openai() as client:
        stream = await client.completions.create(model=MODEL, prompt="hi", stream=True)
        text = "".join([chunk.choices[0].text async for chunk in stream])
        whole = await client.completions.create(model=MODEL, prompt="hi")
    assert text == whole.choices[0].text == "Hello world"
    assert whole.choices[0].finish_reason == "stop"


async def test_several_prompts_give_n_choices_each_in_order_and_one_usage(
    gateway: RunningGateway, tokenizer: ScriptedTokenizer
) -> None:
    async def echo(stream: ScriptedStream) -> None:
        for choice in range(stream.n):
            stream.say(f"{stream.request.generate.text}{choice}", choice=choice)
            stream.finish(choice=choice)
        stream.complete()

    tokenizer.script = echo
    async with gateway.openai() as client:
        whole = await client.completions.create(model=MODEL, prompt=["a", "b"], n=2)
        stream = await client.completions.create(
            model=MODEL, prompt=["a", "b"], n=2, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    expected = ["a0", "a1", "b0", "b1"]
    assert [choice.text for choice in whole.choices] == expected
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    texts = ["", "", "", ""]
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == expected
    assert whole.usage == chunks[-1].usage
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (14, 4)


async def test_chat_logprobs_are_the_same_streamed_and_whole(
    gateway: RunningGateway, tokenizer: ScriptedTokenizer
) -> None:
    tokenizer.script = with_logprobs
    options: Any = {"model": MODEL, "messages": MESSAGES, "logprobs": True, "top_logprobs": 1}
    async with gateway.openai() as client:
        whole = await client.chat.completions.create(**options)
        stream = await client.chat.completions.create(**options, stream=True)
        streamed = [
            entry
            async for chunk in stream
            if chunk.choices[0].logprobs
            for entry in chunk.choices[0].logprobs.content or ()
        ]
    assert whole.choices[0].logprobs is not None
    assert whole.choices[0].logprobs.content == streamed
    assert bytes(byte for entry in streamed for byte in entry.bytes or ()).decode() == "✅!"
    assert streamed[0].top_logprobs[0].logprob == -0.25
    assert tokenizer.opened[0].options.output.logprobs == 1


async def test_completion_logprobs_have_the_older_form(gateway: RunningGateway, tokenizer: ScriptedTokenizer) -> None:
    tokenizer.script = with_logprobs
    async with gateway.openai() as client:
        answer = await client.completions.create(model=MODEL, prompt="hi", logprobs=1)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.tokens == ["\\xe2\\x9c", "\\x85", "!"]
    assert logprobs.token_logprobs == [-0.25] * 3
    assert logprobs.text_offset == [0, 0, 1]
    assert logprobs.top_logprobs is not None
    assert logprobs.top_logprobs[2] == {"!": -0.25}


async def with_prompt_logprobs(stream: ScriptedStream) -> None:
    """A prompt before which the tokenizer put a token of its own, and one token of output for each choice."""
    first = common_pb2.TokenInfo(token_id=0, bytes=b"<s>")
    for choice in range(stream.n):
        stream.say("!", choice=choice, ids=[3], infos=[info(3, b"!")])
        stream.finish(FinishReason.LENGTH, choice=choice)
    stream.complete(prompt=[first, info(1, b"\xe2\x9c"), info(2, b"\x85")])


@pytest.mark.parametrize("prompt", ["✅", [0, 1, 2]])
async def test_echo_puts_the_prompt_and_its_tokens_before_each_choice(
    gateway: RunningGateway, tokenizer: ScriptedTokenizer, prompt: Any
) -> None:
    tokenizer.script = with_prompt_logprobs
    async with gateway.openai() as client:
        answer = await client.completions.create(model=MODEL, prompt=prompt, echo=True, logprobs=1, n=2)
    before = "" if isinstance(prompt, str) else "<s>"  # ids are told as what they spell
    assert [choice.text for choice in answer.choices] == [f"{before}✅!"] * 2
    for choice in answer.choices:
        logprobs = choice.logprobs
        assert logprobs is not None
        assert logprobs.tokens == ["<s>", "\\xe2\\x9c", "\\x85", "!"]
        assert logprobs.token_logprobs == [None, -0.25, -0.25, -0.25]
        assert logprobs.text_offset == [0, len(before), len(before), len(before) + 1]
        assert logprobs.top_logprobs is not None
        assert logprobs.top_logprobs[0] is None
        assert logprobs.top_logprobs[3] == {"!": -0.25}
    assert tokenizer.opened[0].options.output.prompt_logprobs == 1


async def test_echo_of_a_text_asks_for_nothing_and_each_of_several_prompts_is_its_own(
    gateway: RunningGateway, tokenizer: ScriptedTokenizer
) -> None:
    async with gateway.openai() as client:
        answer = await client.completions.create(model=MODEL, prompt=["a: ", "b: "], echo=True)
        with pytest.raises(openai.BadRequestError) as streamed:
            await client.completions.create(model=MODEL, prompt="a", echo=True, stream=True)
    assert [choice.text for choice in answer.choices] == ["a: Hello world", "b: Hello world"]
    assert all(choice.logprobs is None for choice in answer.choices)
    assert not any(stream.options.output.HasField("prompt_logprobs") for stream in tokenizer.opened)
    assert streamed.value.param == "echo"


async def test_a_prompt_of_too_many_tokens_to_tell_of_is_refused_in_the_callers_words(
    gateway: RunningGateway, tokenizer: ScriptedTokenizer
) -> None:
    tokenizer.refuse = lambda _: InvalidRequest("options.output.prompt_logprobs", "can be told of fewer tokens")
    async with gateway.openai() as client:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.completions.create(model=MODEL, prompt="hi", echo=True, logprobs=1)
    assert refused.value.param == "echo"


async def test_models_are_listed_and_found_by_name(gateway: RunningGateway) -> None:
    async with gateway.openai() as client:
        assert [model.id async for model in client.models.list()] == [MODEL]
        assert (await client.models.retrieve(MODEL)).id == MODEL
        with pytest.raises(openai.NotFoundError) as missing:
            await client.models.retrieve("gpt-9")
    assert missing.value.code == "model_not_found"


async def test_the_client_sees_the_request_id_of_answers_and_of_errors(
    gateway: RunningGateway, tokenizer: ScriptedTokenizer
) -> None:
    async with gateway.openai(default_headers={"X-Request-Id": "mine-1"}) as client:
        answer = await client.chat.completions.create(model=MODEL, messages=MESSAGES)
        assert answer._request_id == "mine-1"
        assert tokenizer.opened[0].body.request_id == "mine-1"
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(model=MODEL, messages=[])
    assert refused.value.request_id == "mine-1"


@pytest.mark.parametrize(
    ("refusal", "error"),
    [
        (InvalidRequest("options.sampling.temperature", "must be 0 to 100"), openai.BadRequestError),
        (Overloaded("the queue is full", 2.0), openai.RateLimitError),
        (Unavailable("starting"), openai.InternalServerError),
    ],
)
async def test_a_tokenizers_refusal_is_the_clients_own_exception(
    gateway: RunningGateway, tokenizer: ScriptedTokenizer, refusal: Any, error: type[openai.APIStatusError]
) -> None:
    tokenizer.refuse = lambda _: refusal
    refused: list[openai.APIStatusError] = []
    async with gateway.openai() as client:
        for stream in (False, True):
            options: Any = {"stream": stream}
            with pytest.raises(error) as caught:
                await client.chat.completions.create(model=MODEL, messages=MESSAGES, temperature=1, **options)
            refused.append(caught.value)
    for answer in refused:
        if isinstance(refusal, InvalidRequest):
            assert answer.param == "temperature"
        else:
            assert int(answer.response.headers["Retry-After"]) >= 1


async def test_an_unknown_model_is_the_clients_not_found(gateway: RunningGateway) -> None:
    async with gateway.openai() as client:
        with pytest.raises(openai.NotFoundError) as missing:
            await client.chat.completions.create(model="gpt-9", messages=MESSAGES)
    assert (missing.value.code, missing.value.param) == ("model_not_found", "model")


@pytest.mark.parametrize(
    ("reason", "code", "status"),
    [
        (FinishReason.DEADLINE, "deadline", 504),
        (FinishReason.ABORTED, "aborted", 499),
        (FinishReason.ERROR, "internal", 500),
    ],
)
async def test_an_answer_that_did_not_end_by_itself_is_an_error_streamed_and_not(
    gateway: RunningGateway, tokenizer: ScriptedTokenizer, reason: FinishReason, code: str, status: int
) -> None:
    async def script(stream: ScriptedStream) -> None:
        stream.say("half an ans")
        stream.finish(reason)
        stream.complete()

    tokenizer.script = script
    async with gateway.openai() as client:
        with pytest.raises(openai.APIStatusError) as whole:
            await client.chat.completions.create(model=MODEL, messages=MESSAGES)
        stream = await client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=True)
        into: list[str] = []
        with pytest.raises(openai.APIError) as streamed:
            await _read(stream, into)
    assert "".join(into) == "half an ans"
    assert (whole.value.status_code, whole.value.code, streamed.value.code) == (status, code, code)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_closes_its_connection_is_released_at_once(
    gateway: RunningGateway, tokenizer: ScriptedTokenizer, stream: bool
) -> None:
    async def script(stream: ScriptedStream) -> None:
        stream.say("on")

    tokenizer.script = script
    async with gateway.openai() as client:
        call = asyncio.create_task(
            client.chat.completions.create(model=MODEL, messages=MESSAGES, stream=stream)  # type: ignore[call-overload]
        )
        await wait_until(lambda: tokenizer.opened)
        if stream:
            await (await call).close()
        else:
            call.cancel()
        await asyncio.wait_for(tokenizer.opened[0].released.wait(), 10)
    assert tokenizer.opened[0].end == 2
    await wait_until(lambda: gateway.gateway.open_requests() == 0)


async def _read(stream: Any, into: list[str]) -> None:
    async for chunk in stream:
        into.append(chunk.choices[0].delta.content or "")  # noqa: PERF401  # what came before an error counts
