import pytest

from services.protocol.events import EndOfText, ErrorCode, Failure, FinishReason, StopToken
from services.protocol.request import Constraint, ConstraintKind
from services.runtime.errors import InvalidRequest
from services.scheduler import wire
from services.scheduler.call import Rows
from services.scheduler.engine.api import Logprobs, SamplingSpec, SequenceKey
from services.scheduler.submission import ChoiceStart, Route, TextPlan
from services.scheduler.token_log import End, TokenLog
from tailrace.v1 import common_pb2, scheduler_pb2


def full_submit() -> scheduler_pb2.SubmitRequest:
    return scheduler_pb2.SubmitRequest(
        attempt_id=2**64 - 1,
        attempt_number=3,
        tokenizer="t",
        tokenizer_epoch=2**63,
        tenant="acme",
        request_id="r",
        fence=4,
        prompt_ids=[1, 2, 3],
        choices=[
            scheduler_pb2.SubmitChoice(choice=0),
            scheduler_pb2.SubmitChoice(
                choice=2,
                output_ids=[9],
                output_logprobs=[scheduler_pb2.TokenLogprobs(logprob=-0.5, top_ids=[9], top_logprobs=[-0.5])],
            ),
        ],
        sampling=common_pb2.SamplingParams(
            temperature=0.5,
            top_p=0.25,
            top_k=7,
            min_p=0.125,
            repetition_penalty=1.5,
            presence_penalty=0.5,
            frequency_penalty=-0.5,
            seed=0,
            logit_bias={5: 1.0, 3: -100.0},
        ),
        stopping=common_pb2.StopConditions(
            stop=["a"], stop_token_ids=[8], ignore_eos=True, max_tokens=20, min_tokens=2
        ),
        text=scheduler_pb2.TextPlan(
            stop=["a"],
            include_stop_in_output=True,
            min_tokens=2,
            skip_special_tokens=True,
            spaces_between_special_tokens=True,
            begins_text=True,
            token_info=True,
        ),
        logprobs=1,
        deadline_in_ms=1500,
        record=b"whole",
    )


def test_every_field_of_a_submit_is_read() -> None:
    read = wire.parse_submit(full_submit())
    assert read.attempt_id == 2**64 - 1
    assert read.route == Route("t", 2**63)
    assert (read.attempt_number, read.tenant, read.request_id, read.fence, read.record) == (3, "acme", "r", 4, b"whole")
    assert read.prompt_ids == (1, 2, 3)
    assert read.choices == (ChoiceStart(0), ChoiceStart(2, (9,), (Logprobs(-0.5, (9,), (-0.5,)),)))
    assert read.sampling == SamplingSpec(
        seed=0,
        temperature=0.5,
        top_p=0.25,
        top_k=7,
        min_p=0.125,
        repetition_penalty=1.5,
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        logit_bias=((3, -100.0), (5, 1.0)),
        logprobs=1,
    )
    assert (read.stop_token_ids, read.ignore_eos, read.max_tokens, read.min_tokens) == ((8,), True, 20, 2)
    assert read.text == TextPlan(
        stop=("a",),
        include_stop_in_output=True,
        min_tokens=2,
        skip_special_tokens=True,
        spaces_between_special_tokens=True,
        begins_text=True,
        token_info=True,
    )
    assert read.deadline_in_s == 1.5
    assert read.continues


def test_what_is_absent_has_its_documented_default() -> None:
    read = wire.parse_submit(
        scheduler_pb2.SubmitRequest(attempt_id=1, tokenizer="t", sampling=common_pb2.SamplingParams(seed=3))
    )
    assert read.sampling == SamplingSpec(seed=3)
    assert (read.max_tokens, read.deadline_in_s, read.sampling.logprobs) == (None, None, None)
    assert not read.continues


@pytest.mark.parametrize(("temperature", "served"), [(0.0, 0.0), (1e-6, 0.0), (9e-5, 0.0), (1e-3, 1e-3)])
def test_temperatures_that_would_overflow_are_greedy(temperature: float, served: float) -> None:
    request = full_submit()
    request.sampling.temperature = temperature
    assert wire.parse_submit(request).sampling.temperature == pytest.approx(served)


@pytest.mark.parametrize("top_k", [-1, 0])
def test_top_k_off_is_one_value(top_k: int) -> None:
    request = full_submit()
    request.sampling.top_k = top_k
    assert wire.parse_submit(request).sampling.top_k == 0


@pytest.mark.parametrize("field", ["attempt_id", "tokenizer"])
def test_a_submit_without_its_keys_is_refused(field: str) -> None:
    request = full_submit()
    request.ClearField(field)  # type: ignore[arg-type]  # the stub wants a literal
    with pytest.raises(InvalidRequest) as refused:
        wire.parse_submit(request)
    assert refused.value.field == field


def test_a_route_without_generation_or_name_is_refused() -> None:
    with pytest.raises(InvalidRequest):
        wire.parse_route_key(scheduler_pb2.RouteKey(tokenizer="t"))
    with pytest.raises(InvalidRequest):
        wire.parse_route_key(scheduler_pb2.RouteKey(generation=1))


@pytest.mark.parametrize(
    ("value", "reason"), [(0, FinishReason.ABORTED), (3, FinishReason.ABORTED), (4, FinishReason.DEADLINE)]
)
def test_an_abort_s_reason_is_aborted_or_deadline(value: int, reason: FinishReason) -> None:
    assert wire.parse_abort_reason(value) is reason


@pytest.mark.parametrize("value", [1, 2, 5, 99])
def test_no_other_reason_can_be_given_to_an_abort(value: int) -> None:
    with pytest.raises(InvalidRequest):
        wire.parse_abort_reason(value)


def log_of(text: TextPlan = TextPlan()) -> TokenLog:  # noqa: B008  # frozen
    return TokenLog(SequenceKey(1), 77, 2, Route("t", 1), text, with_logprobs=False)


def test_counts_are_left_out_where_every_row_has_one_id() -> None:
    batch = wire.tokens_to_wire(Rows([], [1, 2], [0, 5], [1, 1], [10, 11])).batch
    assert (list(batch.sequences), list(batch.token_offsets), list(batch.token_ids)) == ([1, 2], [0, 5], [10, 11])
    assert not batch.token_counts


def test_counts_are_there_where_a_row_has_more() -> None:
    batch = wire.tokens_to_wire(Rows([], [1, 2], [0, 5], [2, 1], [10, 11, 12])).batch
    assert list(batch.token_counts) == [2, 1]


def test_an_empty_batch_is_a_batch() -> None:
    assert wire.tokens_to_wire(Rows()).WhichOneof("payload") == "batch"
    assert wire.tokens_heartbeat().WhichOneof("payload") == "batch"


def ended(end: End, cached: int = 0) -> TokenLog:
    log = log_of(TextPlan())
    log.end, log.cached_prompt_tokens = end, cached
    return log


def test_starts_ends_and_markers_are_carried_whole() -> None:
    text = TextPlan(stop=("x",), begins_text=True)
    rows = Rows(
        starts=[(1, log_of(text))],
        ends=[
            (1, ended(End(FinishReason.STOP, 3, stop=StopToken(9)), cached=16)),
            (2, ended(End(FinishReason.STOP, 3, stop=EndOfText(2)))),
            (3, ended(End(FinishReason.ERROR, 0, error=Failure(ErrorCode.OUT_OF_MEMORY, "full")))),
        ],
        released=[5, 2**64 - 1],
    )
    batch = wire.tokens_to_wire(rows).batch
    assert (batch.starts[0].sequence, batch.starts[0].attempt_id, batch.starts[0].choice) == (1, 77, 2)
    assert list(batch.starts[0].text.stop) == ["x"]
    assert batch.starts[0].text.begins_text
    first, second, third = batch.ends
    assert (first.token_offset, first.stop.stop_token_id, first.cached_prompt_tokens) == (3, 9, 16)
    assert second.stop.eos_token_id == 2
    assert (third.error.code, third.error.message) == (common_pb2.ERROR_CODE_OUT_OF_MEMORY, "full")
    assert list(batch.released_attempt_ids) == [5, 2**64 - 1]


@pytest.mark.parametrize("value", [float("-inf"), float("nan"), -1e38])
def test_logprobs_on_the_wire_are_finite(value: float) -> None:
    rows = Rows([], [1], [0], [1], [10], logprobs=[(0, [Logprobs(value, (1, 2), (-0.5, value))])])
    (token,) = wire.tokens_to_wire(rows).batch.row_logprobs[0].tokens
    assert token.logprob == pytest.approx(wire.LOGPROB_FLOOR)
    assert list(token.top_logprobs) == [-0.5, pytest.approx(wire.LOGPROB_FLOOR)]


def test_a_constraint_and_a_priority_are_read_and_ignore_eos_beside_a_constraint_is_refused() -> None:
    request = full_submit()
    request.constraint.choices.texts.extend(["a", "b"])
    request.priority = -3
    with pytest.raises(InvalidRequest):
        wire.parse_submit(request)
    request.stopping.ignore_eos = False
    read = wire.parse_submit(request)
    assert read.priority == -3
    assert read.constraint == Constraint(ConstraintKind.CHOICES, ("a", "b"))
