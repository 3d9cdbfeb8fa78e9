from __future__ import annotations

from services.protocol.answer import AnswerLog
from services.protocol.events import ErrorCode, Failure, Finish, FinishReason, Usage
from services.protocol.genai import NAME_CHARS_MAX, answer_attributes, failure_of, request_attributes
from tailrace.v1 import common_pb2, generation_pb2


def test_what_a_caller_left_out_is_not_told() -> None:
    assert request_attributes(generation_pb2.GenerateRequest(text="secret")) == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "tailrace",
        "gen_ai.output.type": "text",
        "gen_ai.request.stream": True,
    }


def test_all_that_was_asked_for_is_told_but_no_content_and_no_name_without_bound() -> None:
    options = generation_pb2.GenerationOptions(
        sampling=common_pb2.SamplingParams(temperature=0.5, top_p=0.25, top_k=4, seed=9, presence_penalty=0.0),
        stopping=common_pb2.StopConditions(max_tokens=7, stop=["secret"]),
        n=2,
        delivery=generation_pb2.DELIVERY_WHOLE,
        constraint=common_pb2.Constraint(json_schema='{"const": "secret"}'),
    )
    message = generation_pb2.ChatMessage(role="user", content="secret")
    told = request_attributes(generation_pb2.ChatRequest(model="m" * 9999, messages=[message], options=options))
    assert "secret" not in str(told)
    assert told == {
        "gen_ai.operation.name": "chat",
        "gen_ai.provider.name": "tailrace",
        "gen_ai.output.type": "json",
        "gen_ai.request.stream": False,
        "gen_ai.request.model": "m" * NAME_CHARS_MAX,
        "gen_ai.request.choice.count": 2,
        "gen_ai.request.max_tokens": 7,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.25,
        "gen_ai.request.top_k": 4,
        "gen_ai.request.seed": 9,
        "gen_ai.request.presence_penalty": 0.0,
    }


def test_a_seed_that_their_integers_cannot_hold_is_told_as_text() -> None:
    options = generation_pb2.GenerationOptions(sampling=common_pb2.SamplingParams(seed=(1 << 64) - 1))
    told = request_attributes(generation_pb2.GenerateRequest(text="one", options=options))
    assert told["gen_ai.request.seed"] == "18446744073709551615"


def test_an_answer_tells_its_usage_once_it_is_whole_and_the_kind_of_its_failure_not_the_message() -> None:
    log = AnswerLog(2)
    assert (answer_attributes(log), failure_of(log)) == ({}, "")
    log.finish(Finish(0, FinishReason.STOP, 3))
    log.finish(Finish(1, FinishReason.ERROR, 1, error=Failure(ErrorCode.OUT_OF_MEMORY, "secret")))
    log.complete(Usage(5, 4, 4))
    assert failure_of(log) == "OUT_OF_MEMORY"
    assert answer_attributes(log) == {
        "gen_ai.response.finish_reasons": ["stop", "error"],
        "gen_ai.usage.input_tokens": 5,
        "gen_ai.usage.output_tokens": 4,
        "gen_ai.usage.cache_read.input_tokens": 4,
    }
