"""The engine scenarios about what an output must look like: constrained, cut, preempted, continued."""

import json
import math

import pytest

from services.protocol.events import EndOfText, FinishReason
from services.protocol.request import Constraint, ConstraintKind
from services.scheduler import wire
from services.scheduler.admission import Limits
from services.scheduler.call import Rows
from services.scheduler.constraint.compiler import ConstraintCompiler
from services.scheduler.engine.api import CompiledConstraint, Logprobs, SamplingSpec
from services.scheduler.submission import ChoiceStart
from tests.byte_tokenizer import BYTE_VOCAB_SIZE, EOS_ID, text_of, write_byte_tokenizer
from tests.unit.scheduler.driver import Driver

PEOPLE = {
    "type": "array",
    "minItems": 3,
    "maxItems": 3,
    "items": {
        "type": "object",
        "properties": {"name": {"enum": ["Ada", "Grace"]}, "age": {"type": "integer", "minimum": 10, "maximum": 99}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
}


@pytest.fixture(scope="module")
def people(tmp_path_factory: pytest.TempPathFactory) -> CompiledConstraint:
    path = write_byte_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    compiler = ConstraintCompiler(path, BYTE_VOCAB_SIZE, (EOS_ID,))
    return compiler.compile(Constraint(ConstraintKind.JSON_SCHEMA, (json.dumps(PEOPLE),)))


def driver_of(**changes: int) -> Driver:
    limits = Limits(max_running=8, max_step_tokens=changes.pop("max_step_tokens", 64))
    return Driver(limits=limits, vocab_size=BYTE_VOCAB_SIZE, eos_token_ids=(EOS_ID,), **{"block_size": 4, **changes})


def run_alone(constraint: CompiledConstraint, seed: int, max_tokens: int = 200) -> Driver:
    driver = driver_of()
    driver.submit(1, sampling=SamplingSpec(seed=seed, constraint=constraint), max_tokens=max_tokens)
    driver.run()
    return driver


def test_17_what_keeps_to_a_schema_ends_by_itself_and_is_what_it_says(people: CompiledConstraint) -> None:
    driver = run_alone(people, seed=5)
    answer = json.loads(text_of(driver.ids(1)))
    assert len(answer) == 3
    assert all(
        set(one) == {"name", "age"} and one["name"] in ("Ada", "Grace") and 10 <= one["age"] < 100 for one in answer
    )
    assert (driver.end(1).reason, driver.end(1).stop) == (FinishReason.STOP, EndOfText(EOS_ID))


@pytest.mark.parametrize("max_tokens", [1, 7, 40])
def test_17_what_max_tokens_cuts_is_a_beginning_and_ends_as_length(people: CompiledConstraint, max_tokens: int) -> None:
    whole, cut = run_alone(people, 5), run_alone(people, 5, max_tokens)
    assert cut.ids(1) == whole.ids(1)[:max_tokens]
    assert cut.end(1).reason is FinishReason.LENGTH


def test_a_constraint_is_followed_through_preemptions(people: CompiledConstraint) -> None:
    driver = driver_of(total_blocks=26)
    for seed in (1, 2, 3):
        driver.submit(seed, range(20, 20 + seed), sampling=SamplingSpec(seed=seed, constraint=people), max_tokens=90)
    driver.run()
    assert max(driver.sequence(seed).preemptions for seed in (1, 2, 3)) >= 2
    assert all(len(json.loads(text_of(driver.ids(seed)))) == 3 for seed in (1, 2, 3))
    driver.assert_idle()


@pytest.mark.parametrize("known", [1, 20, 60])
def test_a_constraint_is_followed_by_a_continuation(people: CompiledConstraint, known: int) -> None:
    whole = run_alone(people, 5).ids(1)
    driver = driver_of()
    start = ChoiceStart(0, tuple(whole[:known]))
    driver.submit(1, sampling=SamplingSpec(seed=5, constraint=people), choices=(start,), max_tokens=200)
    driver.run()
    assert driver.ids(1) == whole


def test_min_tokens_gives_way_where_a_constraint_lets_nothing_follow(people: CompiledConstraint) -> None:
    driver = driver_of()
    driver.submit(1, sampling=SamplingSpec(seed=5, constraint=people), min_tokens=150, max_tokens=200)
    driver.run()
    assert driver.end(1).reason is FinishReason.STOP
    assert driver.ids(1) == run_alone(people, 5).ids(1)


def test_16_a_constrained_neighbour_changes_nothing_for_others(people: CompiledConstraint) -> None:
    driver = driver_of()
    driver.submit(1, sampling=SamplingSpec(seed=1, constraint=people), max_tokens=50)
    driver.submit(2, (30, 31), max_tokens=50)
    driver.run()
    quiet = driver_of()
    quiet.submit(2, (30, 31), max_tokens=50)
    quiet.run()
    assert driver.ids(2) == quiet.ids(2)


@pytest.mark.parametrize("value", [float("-inf"), float("nan")])
def test_18_a_logprob_of_minus_infinity_is_a_number_that_json_can_carry(value: float) -> None:
    rows = Rows([], [1], [0], [1], [10], logprobs=[(0, [Logprobs(value, (1,), (value,))])])
    (token,) = wire.tokens_to_wire(rows).batch.row_logprobs[0].tokens
    assert math.isfinite(token.logprob)
    assert json.loads(json.dumps({"logprob": token.logprob}, allow_nan=False))["logprob"] == token.logprob
