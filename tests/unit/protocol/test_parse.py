import math

import pytest

from services.protocol.constraint_wire import constraint_to_wire
from services.protocol.model_card import ModelCard
from services.protocol.parse import parse_chat, parse_generate
from services.protocol.request import (
    ChatPrompt,
    Constraint,
    ConstraintKind,
    Failover,
    IdsPrompt,
    Message,
    OnDisconnect,
    TextPrompt,
    ValidRequest,
)
from services.runtime.errors import InvalidRequest, NotFound
from tailrace.v1.common_pb2 import Choices, SamplingParams, StopConditions, TextOptions
from tailrace.v1.common_pb2 import Constraint as ConstraintMessage
from tailrace.v1.generation_pb2 import (
    ChatMessage,
    ChatRequest,
    Delivery,
    GenerateRequest,
    GenerationOptions,
    OutputOptions,
    TokenIds,
)

CARD = ModelCard(model_id="small", vocab_size=1000, context_length=128, eos_token_ids=(2,), tokenizer_digest=b"\0" * 32)


def shown(value: object) -> str:
    """A parameter's name in the test's id: protobuf's text form on one line."""
    return " ".join(str(value).split())[:60]


def generate(**options: object) -> ValidRequest:
    return parse_generate(GenerateRequest(text="Hi", options=GenerationOptions(**options)), CARD)  # type: ignore[arg-type]


def test_an_empty_request_gets_the_documented_defaults() -> None:
    request = parse_generate(GenerateRequest(text="Hi"), CARD)
    assert request == ValidRequest(request_id="", prompt=TextPrompt("Hi"))
    assert request.n == 1
    assert request.sampling.temperature == 1.0
    assert request.stopping.max_tokens is None
    assert request.text.skip_special_tokens
    assert request.on_disconnect is OnDisconnect.ABORT
    assert request.failover is Failover.CONTINUE


def test_explicit_values_that_equal_zero_differ_from_absent_ones() -> None:
    assert generate(sampling=SamplingParams(temperature=0.0)).sampling.temperature == 0.0
    assert generate(sampling=SamplingParams(seed=0)).sampling.seed == 0
    assert generate().sampling.seed is None
    assert not generate(text=TextOptions(skip_special_tokens=False)).text.skip_special_tokens
    assert generate(output=OutputOptions(logprobs=0)).logprobs == 0
    assert generate(output=OutputOptions(logprobs=0)).token_info
    assert generate().logprobs is None


@pytest.mark.parametrize(
    ("sampling", "field"),
    [
        (SamplingParams(temperature=math.nan), "options.sampling.temperature"),
        (SamplingParams(temperature=-1), "options.sampling.temperature"),
        (SamplingParams(temperature=math.inf), "options.sampling.temperature"),
        (SamplingParams(top_p=0), "options.sampling.top_p"),
        (SamplingParams(top_p=1.5), "options.sampling.top_p"),
        (SamplingParams(top_k=-2), "options.sampling.top_k"),
        (SamplingParams(min_p=-0.1), "options.sampling.min_p"),
        (SamplingParams(repetition_penalty=0), "options.sampling.repetition_penalty"),
        (SamplingParams(presence_penalty=2.5), "options.sampling.presence_penalty"),
        (SamplingParams(frequency_penalty=math.nan), "options.sampling.frequency_penalty"),
        (SamplingParams(logit_bias={1000: 1.0}), "options.sampling.logit_bias"),
        (SamplingParams(logit_bias={5: math.nan}), "options.sampling.logit_bias[5]"),
        (SamplingParams(logit_bias={5: -math.inf}), "options.sampling.logit_bias[5]"),
    ],
    ids=shown,
)
def test_sampling_out_of_range_is_refused_by_name(sampling: SamplingParams, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        generate(sampling=sampling)
    assert refused.value.field == field


@pytest.mark.parametrize("temperature", [1e-4, 1e-5, 1e-6, 0.0, 100.0])
def test_any_temperature_from_zero_to_a_hundred_is_served(temperature: float) -> None:
    assert generate(sampling=SamplingParams(temperature=temperature)).sampling.temperature == pytest.approx(temperature)


@pytest.mark.parametrize(("given", "served"), [(-1, 0), (0, 0), (1, 1), (9_999_999, 9_999_999)])
def test_top_k_minus_one_and_zero_are_off_and_more_than_the_vocabulary_is_fine(given: int, served: int) -> None:
    assert generate(sampling=SamplingParams(top_k=given)).sampling.top_k == served


@pytest.mark.parametrize(
    ("stopping", "field"),
    [
        (StopConditions(stop=["ok", ""]), "options.stopping.stop[1]"),
        (StopConditions(stop=["x" * 1025]), "options.stopping.stop[0]"),
        (StopConditions(stop=[str(i) for i in range(65)]), "options.stopping.stop"),
        (StopConditions(stop_token_ids=[1000]), "options.stopping.stop_token_ids[0]"),
        (StopConditions(max_tokens=0), "options.stopping.max_tokens"),
        (StopConditions(max_tokens=3, min_tokens=4), "options.stopping.min_tokens"),
    ],
    ids=shown,
)
def test_stop_conditions_out_of_range_are_refused_by_name(stopping: StopConditions, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        generate(stopping=stopping)
    assert refused.value.field == field


def test_a_stop_of_whitespace_is_a_stop_like_any_other() -> None:
    assert generate(stopping=StopConditions(stop=[" ", "\n"])).stopping.stop == (" ", "\n")


@pytest.mark.parametrize("n", [0, 129, 1_000_000])
def test_n_out_of_range_is_refused(n: int) -> None:
    with pytest.raises(InvalidRequest) as refused:
        generate(n=n)
    assert refused.value.field == "options.n"


def test_an_unknown_enum_value_is_refused_by_name() -> None:
    options = GenerationOptions()
    options.ParseFromString(GenerationOptions(delivery=Delivery.DELIVERY_WHOLE).SerializeToString()[:-1] + b"\x63")
    with pytest.raises(InvalidRequest) as refused:
        parse_generate(GenerateRequest(text="Hi", options=options), CARD)
    assert refused.value.field == "options.delivery"


@pytest.mark.parametrize(
    ("request_pb", "field"),
    [
        (GenerateRequest(), "prompt"),
        (GenerateRequest(text=""), "text"),
        (GenerateRequest(token_ids=TokenIds()), "token_ids.ids"),
        (GenerateRequest(token_ids=TokenIds(ids=[1, 1000])), "token_ids.ids[1]"),
        (GenerateRequest(text="Hi", request_id="a b"), "request_id"),
        (GenerateRequest(text="Hi", request_id="x" * 129), "request_id"),
    ],
    ids=shown,
)
def test_a_prompt_that_cannot_be_continued_is_refused_by_name(request_pb: GenerateRequest, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse_generate(request_pb, CARD)
    assert refused.value.field == field


def test_ids_are_taken_as_they_are() -> None:
    request = parse_generate(GenerateRequest(token_ids=TokenIds(ids=[0, 999])), CARD)
    assert request.prompt == IdsPrompt((0, 999))


def test_an_unknown_model_is_not_found_and_says_which_one_is() -> None:
    with pytest.raises(NotFound, match="small"):
        parse_generate(GenerateRequest(text="Hi", model="large"), CARD)


def test_a_conversation_keeps_its_turns_in_order() -> None:
    pb = ChatRequest(messages=[ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content="Hi")])
    assert parse_chat(pb, CARD).prompt == ChatPrompt((Message("system", "Be brief."), Message("user", "Hi")))


@pytest.mark.parametrize(
    ("messages", "field"),
    [([], "messages"), ([ChatMessage(content="Hi")], "messages[0].role")],
    ids=shown,
)
def test_a_conversation_without_turns_or_roles_is_refused(messages: list[ChatMessage], field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        parse_chat(ChatRequest(messages=messages), CARD)
    assert refused.value.field == field


@pytest.mark.parametrize("priority", [-101, 101])
def test_a_priority_beyond_its_range_is_refused(priority: int) -> None:
    assert generate(priority=-100).priority == -100
    with pytest.raises(InvalidRequest) as refused:
        generate(priority=priority)
    assert refused.value.field == "options.priority"


def test_every_kind_of_constraint_survives_the_wire() -> None:
    for kind in ConstraintKind:
        constraint = Constraint(kind, ("a", "b") if kind is ConstraintKind.CHOICES else ("a",))
        assert generate(constraint=constraint_to_wire(constraint)).constraint == constraint


@pytest.mark.parametrize(
    ("constraint", "field"),
    [
        (ConstraintMessage(), "options.constraint"),
        (ConstraintMessage(regex=""), "options.constraint.regex"),
        (ConstraintMessage(choices=Choices(texts=["a", ""])), "options.constraint.choices.texts"),
        (ConstraintMessage(grammar="ü" * (32 << 10) + "x"), "options.constraint.grammar"),
    ],
    ids=["none", "empty", "an empty choice", "too large"],
)
def test_a_constraint_that_says_nothing_or_too_much_is_refused(constraint: ConstraintMessage, field: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        generate(constraint=constraint)
    assert refused.value.field == field
