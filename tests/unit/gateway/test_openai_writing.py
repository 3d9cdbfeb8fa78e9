from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.openai.chat import ChatForm
from gateway.openai.chunks import AnswerChunks, usage_object
from gateway.openai.completions import CompletionsForm
from gateway.openai.errors import RequestAborted, failure_of, parameter_of, reply_of
from gateway.openai.json_text import json_text
from gateway.openai.logprobs import CompletionLogprobs
from gateway.openai.streamed import together
from services.protocol.events import (
    Completed,
    Delta,
    EndOfText,
    ErrorCode,
    Failure,
    Finish,
    FinishReason,
    StopText,
    StopToken,
    TokenInfo,
    TopLogprob,
    Usage,
)
from services.runtime.errors import (
    DeadlineExceeded,
    InternalError,
    InvalidRequest,
    NotFound,
    Overloaded,
    TailraceError,
    Unavailable,
)

ENVELOPE = {"id": "x-1", "object": "o", "created": 1, "model": "m"}
STOP = Finish(0, FinishReason.STOP, 1)


def chunks(form: Any = None, **options: Any) -> AnswerChunks:
    values = {"first_choice": 0, "n": 1, "include_usage": False, "logprobs": False, **options}
    return AnswerChunks(form or ChatForm(), ENVELOPE, **values)


def parsed(data: bytes) -> list[dict[str, Any]]:
    """The events, read as a client that splits lines by Unicode's rules does."""
    lines = data.decode("utf-8").splitlines()
    assert all(line.startswith("data: ") or not line for line in lines)
    return [json.loads(line.removeprefix("data: ")) for line in lines if line]


def written(writer: AnswerChunks, *events: Any) -> list[dict[str, Any]]:
    data, failure = writer.encode(events)
    assert failure is None
    return parsed(data)


@given(st.text())
def test_any_text_comes_back_from_json_and_no_line_separator_is_on_the_wire(text: str) -> None:
    data = json_text(text)
    assert json.loads(data) == text
    assert len(data.decode("utf-8").splitlines()) == 1


@given(st.lists(st.text(alphabet=st.sampled_from('a✅\u2028\u2029\u0085\n\r\x0b\x1c"\\\x00😀')), max_size=8))
def test_the_chunks_join_to_the_text(pieces: list[str]) -> None:
    for form, text_of in (
        (ChatForm(), lambda choice: choice["delta"].get("content", "")),
        (CompletionsForm(), lambda choice: choice["text"]),
    ):
        events = written(chunks(form), *(Delta(0, piece, [1], 1, 1) for piece in pieces))
        assert "".join(text_of(event["choices"][0]) for event in events) == "".join(pieces)


def test_finish_reason_is_there_and_null_until_the_last_chunk() -> None:
    events = written(chunks(), Delta(0, "a", [1], 1, 1), Delta(0, "b", [2], 2, 2), STOP)
    assert [event["choices"][0]["finish_reason"] for event in events] == [None, None, "stop"]
    assert all("logprobs" in event["choices"][0] for event in events)


def test_the_role_is_in_the_opening_of_each_choice_only() -> None:
    writer = chunks(n=2)
    opening = parsed(writer.opening())
    assert [(e["choices"][0]["index"], e["choices"][0]["delta"]["role"]) for e in opening] == [
        (0, "assistant"),
        (1, "assistant"),
    ]
    later = written(writer, Delta(1, "a", [1], 1, 1), STOP)
    assert all("role" not in event["choices"][0]["delta"] for event in later)
    assert not chunks(CompletionsForm()).opening()


def test_a_choice_is_numbered_from_its_prompts_first() -> None:
    events = written(chunks(CompletionsForm(), first_choice=4, n=2), Delta(1, "a", [1], 1, 1))
    assert events[0]["choices"][0]["index"] == 5


def test_usage_is_null_in_every_chunk_when_it_was_asked_for_and_absent_otherwise() -> None:
    delta = Delta(0, "a", [1], 1, 1)
    assert all(event["usage"] is None for event in written(chunks(include_usage=True), delta, STOP))
    assert all("usage" not in event for event in written(chunks(), delta, STOP))


def test_a_delta_without_text_is_no_chunk() -> None:
    assert written(chunks(), Delta(0, "", [1], 1, 0)) == []


@pytest.mark.parametrize(
    ("finish", "reason", "stop"),
    [
        (Finish(0, FinishReason.STOP, 1, StopText("END")), "stop", "END"),
        (Finish(0, FinishReason.STOP, 1, StopToken(7)), "stop", 7),
        (Finish(0, FinishReason.STOP, 1, EndOfText(2)), "stop", None),
        (Finish(0, FinishReason.LENGTH, 1), "length", None),
    ],
)
def test_a_clean_end_says_why(finish: Finish, reason: str, stop: object) -> None:
    choice = written(chunks(), finish)[0]["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"], choice["delta"]) == (reason, stop, {})


@pytest.mark.parametrize(
    ("finish", "error", "status"),
    [
        (Finish(0, FinishReason.DEADLINE, 1), DeadlineExceeded, 504),
        (Finish(0, FinishReason.ABORTED, 1), RequestAborted, 499),
        (Finish(0, FinishReason.ERROR, 1, error=Failure(ErrorCode.ENGINE_LOST, "x")), Unavailable, 503),
        (Finish(0, FinishReason.ERROR, 1, error=Failure(ErrorCode.OUT_OF_MEMORY, "x")), InternalError, 500),
        (Finish(0, FinishReason.ERROR, 1), InternalError, 500),
    ],
)
def test_no_other_end_is_ever_a_chunk(finish: Finish, error: type[TailraceError], status: int) -> None:
    data, failure = chunks().encode([Delta(0, "a", [1], 1, 1), finish, Completed(Usage(1, 0, 1))])
    assert [event["choices"][0]["finish_reason"] for event in parsed(data)] == [None]
    assert isinstance(failure, error)
    assert reply_of(failure).status == status


@pytest.mark.parametrize("reason", list(FinishReason))
def test_every_finish_reason_is_either_clean_or_a_failure(reason: FinishReason) -> None:
    clean = reason in (FinishReason.STOP, FinishReason.LENGTH)
    assert (failure_of(Finish(0, reason, 1)) is None) == clean


def test_usage_is_summed_over_prompts() -> None:
    usage = usage_object([Usage(3, 1, 5), Usage(4, 0, 6)])
    assert usage["prompt_tokens"] == 7
    assert usage["completion_tokens"] == 11
    assert usage["total_tokens"] == 18
    assert usage["prompt_tokens_details"]["cached_tokens"] == 1


NAMES = {"sampling.temperature": "temperature", "stopping.max_tokens": "max_completion_tokens"}


@pytest.mark.parametrize(
    ("field", "name"),
    [
        ("options.sampling.temperature", "temperature"),
        ("options.stopping.max_tokens", "max_completion_tokens"),
        ("options.stopping.stop[3]", "stop[3]"),
        ("options.sampling.logit_bias[7]", "logit_bias[7]"),
        ("options.n", "n"),
        ("messages[2].role", "messages[2].role"),
        ("text", "prompt"),
        ("token_ids.ids[4]", "prompt[4]"),
        ("", ""),
    ],
)
def test_a_field_of_the_contract_is_told_as_the_parameter_that_set_it(field: str, name: str) -> None:
    assert parameter_of(field, NAMES) == name


def test_errors_have_openais_form() -> None:
    assert reply_of(InvalidRequest("options.sampling.temperature", "must be 0 to 100"), NAMES).body == {
        "error": {
            "message": "temperature: must be 0 to 100",
            "type": "invalid_request_error",
            "param": "temperature",
            "code": "invalid_request",
        }
    }
    assert reply_of(NotFound("model 'x'")).body["error"]["code"] == "model_not_found"
    assert reply_of(Overloaded("full", 2.5)).retry_after_s == 3
    assert reply_of(Unavailable("down")).status == 503


def infos(*tokens: bytes) -> Sequence[TokenInfo]:
    return [TokenInfo(i, token, -0.5, (TopLogprob(i, -0.5, token),)) for i, token in enumerate(tokens)]


def test_chat_logprobs_have_bytes_and_alternatives() -> None:
    event = written(chunks(logprobs=True), Delta(0, "✅", [1, 2], 2, 1, infos(b"\xe2\x9c", b"\x85")))[0]
    content = event["choices"][0]["logprobs"]["content"]
    assert [entry["bytes"] for entry in content] == [[0xE2, 0x9C], [0x85]]
    assert content[0]["token"] == "\\xe2\\x9c"
    assert content[0]["top_logprobs"][0]["logprob"] == -0.5


def test_a_delta_that_has_only_logprobs_is_a_chunk() -> None:
    assert written(chunks(logprobs=True), Delta(0, "", [1], 1, 0, infos(b"")))[0]["choices"][0]["logprobs"]


def test_completion_offsets_count_code_points_across_deltas() -> None:
    writer = CompletionLogprobs()
    assert writer.more(infos("aé".encode(), b"\xf0\x9f"))["text_offset"] == [0, 2]
    assert writer.more(infos(b"\x98\x80", b"b"))["text_offset"] == [2, 3]


@pytest.mark.parametrize("failure", [ConnectionResetError("the caller left"), Unavailable("the stream was cut")])
async def test_of_several_answers_the_first_failure_is_raised_as_it_is(failure: Exception) -> None:
    # A caller who left is no bug of ours, however many answers were being written to it.
    async def fail() -> None:
        raise failure

    ended = asyncio.Event()

    async def go_on() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    with pytest.raises(type(failure)):
        await together([go_on(), fail()])
    assert ended.is_set()
