from __future__ import annotations

from typing import Any

import pytest

from gateway.openai.call import Call
from gateway.openai.chat import ChatForm
from gateway.openai.completions import CompletionsForm
from gateway.openai.parameters import CHAT, COMPLETIONS, IGNORED, NEUTRAL
from services.runtime.errors import InvalidRequest
from tailrace.v1 import generation_pb2

MESSAGES = [{"role": "user", "content": "hi"}]


def chat(**body: Any) -> generation_pb2.ChatRequest:
    request = call_of(**body).requests[0]
    assert isinstance(request, generation_pb2.ChatRequest)
    return request


def call_of(**body: Any) -> Call:
    return ChatForm().read({"messages": MESSAGES, **body}, "r-1")


def complete(**body: Any) -> Call:
    return CompletionsForm().read({"prompt": "hi", **body}, "r-1")


def refusal(read: Any, **body: Any) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        read(**body)
    return caught.value


def test_every_parameter_of_the_table_reaches_the_contract() -> None:
    given = {
        "temperature": 0.5,
        "top_p": 0.25,
        "top_k": 5,
        "min_p": 0.125,
        "repetition_penalty": 1.5,
        "presence_penalty": 1,
        "frequency_penalty": -0.5,
        "seed": 42,
        "logit_bias": {"7": -100},
        "stop": ["a", "b"],
        "stop_token_ids": [3],
        "include_stop_in_output": True,
        "ignore_eos": True,
        "max_completion_tokens": 9,
        "min_tokens": 2,
        "skip_special_tokens": False,
        "spaces_between_special_tokens": True,
        "n": 3,
        "timeout_ms": 1500,
        "logprobs": True,
        "top_logprobs": 4,
    }
    options = chat(**given).options
    assert options.sampling.temperature == 0.5
    assert options.sampling.top_p == 0.25
    assert options.sampling.top_k == 5
    assert options.sampling.min_p == 0.125
    assert options.sampling.repetition_penalty == 1.5
    assert options.sampling.presence_penalty == 1
    assert options.sampling.frequency_penalty == -0.5
    assert options.sampling.seed == 42
    assert dict(options.sampling.logit_bias) == {7: -100}
    assert list(options.stopping.stop) == ["a", "b"]
    assert list(options.stopping.stop_token_ids) == [3]
    assert options.stopping.include_stop_in_output
    assert options.stopping.ignore_eos
    assert options.stopping.max_tokens == 9
    assert options.stopping.min_tokens == 2
    assert not options.text.skip_special_tokens
    assert options.text.spaces_between_special_tokens
    assert options.n == 3
    assert options.timeout_ms == 1500
    assert options.output.logprobs == 4


@pytest.mark.parametrize("name", sorted({p.name for p in (*CHAT, *COMPLETIONS)} - {"stream"}))
def test_null_is_the_same_as_not_given(name: str) -> None:
    read = complete if name == "logprobs" else call_of
    assert read(**{name: None}).requests == read().requests


@pytest.mark.parametrize("table", [CHAT, COMPLETIONS])
def test_every_path_of_the_table_is_a_field_of_the_contract(table: Any) -> None:
    for parameter in table:
        fields: Any = generation_pb2.GenerationOptions.DESCRIPTOR
        *parents, last = parameter.path.split(".")
        for parent in parents:
            fields = fields.fields_by_name[parent].message_type
        assert last in fields.fields_by_name, parameter.name


def test_max_completion_tokens_wins_over_max_tokens_and_null_over_neither() -> None:
    assert chat(max_tokens=5, max_completion_tokens=9).options.stopping.max_tokens == 9
    assert chat(max_tokens=5, max_completion_tokens=None).options.stopping.max_tokens == 5
    assert not chat(max_tokens=None).options.stopping.HasField("max_tokens")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "1"),
        ("temperature", True),
        ("top_k", 1.5),
        ("top_k", 2**31),
        ("n", True),
        ("n", -1),
        ("n", 2**32),
        ("max_tokens", 5.0),
        ("max_tokens", -1),
        ("seed", 2**64),
        ("seed", 1e30),
        ("stop", 5),
        ("ignore_eos", 1),
        ("stream", "yes"),
        ("logit_bias", []),
        ("logprobs", 1),
        ("model", 5),
    ],
)
def test_a_value_of_a_wrong_type_is_refused_by_name(name: str, value: object) -> None:
    assert refusal(call_of, **{name: value}).field == name


@pytest.mark.parametrize(
    ("body", "field"),
    [
        ({"stop": ["a", 5]}, "stop[1]"),
        ({"stop_token_ids": [1, -1]}, "stop_token_ids[1]"),
        ({"logit_bias": {"1": "x"}}, 'logit_bias["1"]'),
        ({"messages": []}, "messages"),
        ({"messages": None}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [*MESSAGES, {"role": "user"}]}, "messages[1].content"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": "x", "colour": 1}]}, "messages[0].colour"),
        ({"messages": [{"role": "assistant", "content": "x", "tool_calls": [{}]}]}, "messages[0].tool_calls"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options.x"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"top_logprobs": 3, "logprobs": False}, "top_logprobs"),
    ],
)
def test_a_refusal_names_the_place_inside_the_parameter(body: dict[str, Any], field: str) -> None:
    assert refusal(call_of, **body).field == field


def test_more_messages_than_any_conversation_has_are_refused_before_they_are_read() -> None:
    assert refusal(call_of, messages=[None] * 1_000_000).field == "messages"


def test_a_stop_may_be_a_text_or_a_list_and_more_than_sixteen() -> None:
    assert list(chat(stop="\n\nÜ✅").options.stopping.stop) == ["\n\nÜ✅"]
    assert len(chat(stop=[str(i) for i in range(17)]).options.stopping.stop) == 17


def test_a_negative_seed_is_its_twos_complement() -> None:
    assert chat(seed=-1).options.sampling.seed == 2**64 - 1


def test_content_parts_are_joined_as_they_are() -> None:
    parts = [{"type": "text", "text": "a "}, {"type": "text", "text": "b"}]
    assert chat(messages=[{"role": "user", "content": parts}]).messages[0].content == "a b"


def test_an_image_is_refused_with_the_reason() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": "data:"}}]
    error = refusal(call_of, messages=[{"role": "user", "content": parts}])
    assert error.field == "messages[0].content[1]"
    assert "text only" in error.message
    assert "image_url" in error.message


def test_what_the_client_got_it_may_send_back() -> None:
    echoed = {
        "role": "assistant",
        "content": "x",
        "refusal": None,
        "annotations": [],
        "tool_calls": None,
        "audio": None,
    }
    assert chat(messages=[*MESSAGES, echoed]).messages[1].content == "x"


def test_developer_is_what_system_was_and_other_roles_are_the_templates_business() -> None:
    roles = ["developer", "system", "tool", "ipython"]
    read = chat(messages=[{"role": role, "content": "x"} for role in roles]).messages
    assert [message.role for message in read] == ["system", "system", "tool", "ipython"]


@pytest.mark.parametrize("name", sorted(IGNORED))
def test_what_can_not_change_the_output_is_ignored(name: str) -> None:
    assert call_of(**{name: "x"}).requests == call_of().requests


@pytest.mark.parametrize("name", sorted(NEUTRAL))
def test_what_is_not_served_is_refused_by_name_unless_it_asks_for_nothing(name: str) -> None:
    for nothing in (None, *NEUTRAL[name]):
        assert call_of(**{name: nothing}).requests == call_of().requests
    error = refusal(call_of, **{name: [{"some": "thing"}]})
    assert error.field == name
    assert "not served" in error.message


def test_a_misspelt_parameter_is_refused_with_what_it_may_have_meant() -> None:
    error = refusal(call_of, temprature=0)
    assert error.field == "temprature"
    assert "temperature" in error.message


def test_logprobs_without_alternatives_is_zero_alternatives() -> None:
    assert chat(logprobs=True).options.output.logprobs == 0
    assert chat(logprobs=True).options.output.HasField("logprobs")
    assert not chat(logprobs=False).options.output.HasField("logprobs")


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("a", ["a"]),
        (["a", "b"], ["a", "b"]),
        ([1, 2], [[1, 2]]),
        ([[1, 2], [3]], [[1, 2], [3]]),
        (["a", [1]], ["a", [1]]),
    ],
)
def test_a_prompt_may_be_one_or_several_as_text_or_ids(prompt: Any, expected: list[Any]) -> None:
    read = complete(prompt=prompt).requests
    got = [r.text if r.HasField("text") else list(r.token_ids.ids) for r in read]  # type: ignore[union-attr]
    assert got == expected


def test_several_prompts_are_several_requests_with_ids_of_their_own() -> None:
    assert [request.request_id for request in complete(prompt=["a", "b"]).requests] == ["r-1:0", "r-1:1"]


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        (None, "prompt"),
        ([], "prompt"),
        (5, "prompt"),
        ([1, -1], "prompt[1]"),
        ([1, "a"], "prompt[1]"),
        (["a", None], "prompt[1]"),
        ([[1, 2**32]], "prompt[0][1]"),
        ([True], "prompt[0]"),
    ],
)
def test_a_prompt_of_a_wrong_type_is_refused_by_place(prompt: Any, field: str) -> None:
    assert refusal(complete, prompt=prompt).field == field


def test_prompts_times_choices_are_bounded() -> None:
    assert refusal(complete, prompt=["a"] * 64, n=3).field == "prompt"
    assert refusal(complete, n=1_000_000).field == "n"
