from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.runtime.errors import InvalidRequest
from services.scheduler.admission import (
    RETRY_S_MAX,
    RETRY_S_MIN,
    RETRY_S_UNKNOWN,
    EndRate,
    Limits,
    Tombstones,
    longest_sequence,
    output_limit,
)
from services.scheduler.engine.api import EngineInfo, Logprobs, SamplingSpec
from services.scheduler.submission import ChoiceStart
from tests.unit.scheduler.driver import submission


def info(**changes: Any) -> EngineInfo:
    sizes = {"vocab_size": 100, "context_length": 64, "block_size": 4, "total_blocks": 100}
    return EngineInfo(model_id="m", eos_token_ids=(2,), **(sizes | changes))


@pytest.mark.parametrize(
    ("field", "prompt_ids", "changes"),
    [
        ("prompt_ids", (), {}),
        ("prompt_ids", (5, 100), {}),
        ("prompt_ids", (5, 2**32 - 1), {}),
        ("prompt_ids", (5, -1), {}),
        ("prompt_ids", (5,) * 64, {}),
        ("prompt_ids", (5,) * 65, {}),
        ("choices", (5,), {"choices": ()}),
        ("choices", (5,), {"choices": (ChoiceStart(1), ChoiceStart(1))}),
        ("choices[1].output_ids", (5,), {"choices": (ChoiceStart(0), ChoiceStart(1, (100,)))}),
        ("choices[0].output_logprobs", (5,), {"choices": (ChoiceStart(0, (1,), (Logprobs(0.0, (), ()),)),)}),
        (
            "choices[0].output_logprobs",
            (5,),
            {"choices": (ChoiceStart(0, (1,)),), "sampling": SamplingSpec(seed=1, logprobs=0)},
        ),
        ("stopping.stop_token_ids", (5,), {"stop_token_ids": (100,)}),
        ("stopping.max_tokens", (5,), {"max_tokens": 0}),
        ("sampling.logit_bias", (5,), {"sampling": SamplingSpec(seed=1, logit_bias=((100, 1.0),))}),
    ],
)
def test_what_can_never_be_served_is_refused_with_its_field(
    field: str, prompt_ids: tuple[int, ...], changes: dict[str, Any]
) -> None:
    with pytest.raises(InvalidRequest) as refused:
        output_limit(submission(1, prompt_ids, **changes), info())
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "limit"),
    [(63, 5, 1), (10, 54, 54), (10, 55, 54), (10, None, 54), (10, 3, 3)],
)
def test_output_is_clipped_to_what_the_context_leaves(prompt: int, max_tokens: int | None, limit: int) -> None:
    assert output_limit(submission(1, (5,) * prompt, max_tokens=max_tokens), info()) == limit


def test_a_prompt_that_the_whole_pool_could_not_hold_is_refused_and_says_so() -> None:
    with pytest.raises(InvalidRequest, match="KV cache holds 9 tokens"):
        output_limit(submission(1, (5,) * 9), info(total_blocks=2))


@given(st.integers(1, 50), st.integers(1, 7), st.integers(2, 300))
def test_whatever_is_accepted_fits_an_empty_pool(blocks: int, block_size: int, context: int) -> None:
    engine = info(total_blocks=blocks, block_size=block_size, context_length=context)
    longest = longest_sequence(engine)
    assert longest <= context
    # All tokens but the last, which is never computed, in whole blocks.
    assert -(-(longest - 1) // block_size) <= blocks
    assert output_limit(submission(1, (5,), max_tokens=None), engine) == longest - 1


@pytest.mark.parametrize(
    "wrong",
    [{"max_running": 0}, {"max_waiting": -1}, {"max_running": 9, "max_step_tokens": 8}, {"max_held": 10}],
)
def test_limits_that_contradict_each_other_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError):
        Limits(**wrong)


def test_a_tombstone_stands_for_its_time_and_no_longer() -> None:
    tombstones = Tombstones(ttl_s=10, max_count=5)
    tombstones.add(1, 0.0)
    tombstones.add(2, 5.0)
    tombstones.forget_old(9.9)
    assert 1 in tombstones
    tombstones.forget_old(10.0)
    assert 1 not in tombstones
    assert 2 in tombstones


def test_burying_again_starts_the_time_anew() -> None:
    tombstones = Tombstones(ttl_s=10, max_count=5)
    tombstones.add(1, 0.0)
    tombstones.add(1, 8.0)
    tombstones.forget_old(12.0)
    assert 1 in tombstones


def test_beyond_the_bound_the_oldest_tombstone_goes() -> None:
    tombstones = Tombstones(ttl_s=10, max_count=3)
    for attempt_id in range(5):
        tombstones.add(attempt_id, 0.0)
    assert [attempt_id in tombstones for attempt_id in range(5)] == [False, False, True, True, True]
    assert len(tombstones) == 3


def test_retry_hint_follows_the_recent_rate_of_ends() -> None:
    rate = EndRate()
    assert rate.retry_after_s(1, 0.0) == RETRY_S_UNKNOWN
    for second in range(40):
        rate.add(2, float(second))
    busy = rate.retry_after_s(4, 40.0)
    assert 1.0 < busy < 4.0
    assert rate.retry_after_s(8, 40.0) == pytest.approx(2 * busy)
    assert rate.retry_after_s(10**6, 40.0) == RETRY_S_MAX
    rate.add(10**6, 40.0)
    assert rate.retry_after_s(1, 40.0) == RETRY_S_MIN
    assert rate.retry_after_s(1, 10_000.0) == RETRY_S_UNKNOWN
