"""The engine scenarios that a scheduler answers for whatever computes: each one broke a well-known server."""

import pytest

from services.protocol.events import EndOfText, ErrorCode, FinishReason
from services.runtime.errors import InvalidRequest
from services.scheduler.admission import Limits
from services.scheduler.engine.api import SamplingSpec
from services.scheduler.state import SequencePhase
from services.scheduler.submission import ChoiceStart
from tests.unit.scheduler.driver import Driver, alone


def test_01_a_seeded_request_gives_the_same_ids_whoever_is_beside_it() -> None:
    driver = Driver()
    driver.submit(1, sampling=SamplingSpec(seed=42))
    driver.submit(2, sampling=SamplingSpec(seed=99))
    driver.submit(3, sampling=SamplingSpec(seed=42, top_k=5), prompt_ids=(50,))
    driver.run()
    assert driver.ids(1) == alone(1, sampling=SamplingSpec(seed=42))


def test_05_a_row_without_numbers_is_a_typed_error_and_neighbours_go_on() -> None:
    driver = Driver(bad_output_id=99)
    driver.submit(1, (20, 99))
    driver.submit(2)
    driver.run()
    error = driver.end(1).error
    assert error is not None
    assert error.code is ErrorCode.BAD_MODEL_OUTPUT
    assert driver.ids(1) == []
    assert driver.ids(2) == alone(2)


def test_06_a_bias_on_an_id_out_of_the_vocabulary_is_refused() -> None:
    driver = Driver()
    with pytest.raises(InvalidRequest) as refused:
        driver.submit(1, sampling=SamplingSpec(seed=1, logit_bias=((49152, 1.0),)))
    assert refused.value.field == "sampling.logit_bias"
    assert driver.core.attempts == {}


def test_07_two_equal_prompts_together_free_no_block_in_use() -> None:
    driver = Driver(block_size=4, total_blocks=32)
    driver.submit(1, range(20, 40), max_tokens=4)
    driver.submit(2, range(20, 40), max_tokens=20)
    while driver.core.has_work:
        driver.step()
        driver.core.check_integrity()
    driver.assert_idle()


def test_08_a_prefix_whose_owner_was_aborted_between_two_chunks_is_shared_as_far_as_it_was_computed() -> None:
    driver = Driver(block_size=4, limits=Limits(max_running=2, max_step_tokens=10))
    driver.submit(1, range(20, 60))
    driver.step()
    driver.begin()  # the second chunk
    driver.abort(1)
    driver.finish()
    driver.submit(2, range(20, 60))
    driver.run()
    assert driver.cached(2) == 8  # of ten computed ids, the eight that fill blocks
    assert driver.ids(2) == alone(2, range(20, 60))
    driver.assert_idle()


def test_10_a_flush_with_a_live_request_is_deferred_for_what_it_holds() -> None:
    driver = Driver(block_size=4)
    driver.submit(1, range(20, 40), max_tokens=20)
    for _ in range(3):
        driver.step()
    assert driver.core.cache.flush() == 5
    driver.submit(2, range(20, 40))
    driver.run()
    assert driver.ids(1) == alone(1, range(20, 40), max_tokens=20)
    assert driver.cached(2) == 0
    driver.assert_idle()


@pytest.mark.parametrize("block_size", [1, 2, 3, 16])
@pytest.mark.parametrize("prompt", [9, 10, 11, 12, 13])
def test_11_block_rounding_makes_no_request_unfit_for_an_empty_pool(block_size: int, prompt: int) -> None:
    driver = Driver(block_size=block_size, total_blocks=96 // block_size, context_length=8192)
    for attempt_id in (1, 2):
        driver.submit(attempt_id, range(20, 20 + prompt), max_tokens=4084)
    driver.run()
    assert driver.end(1).token_offset == driver.end(2).token_offset == 97 - prompt
    assert driver.end(1).reason is FinishReason.LENGTH
    driver.assert_idle()


def test_12_the_pool_runs_full_in_the_middle_of_a_chunked_prefill() -> None:
    driver = Driver(block_size=4, total_blocks=14, limits=Limits(max_running=2, max_step_tokens=4))
    driver.submit(1, range(20, 28), max_tokens=30)
    for _ in range(4):
        driver.step()
    driver.submit(2, range(60, 96), max_tokens=4)
    while driver.sequence(2).preemptions == 0 and driver.core.has_work:
        driver.step()
    assert driver.sequence(2).log.ids.tolist() == []
    driver.run()
    assert driver.ids(1) == alone(1, range(20, 28), max_tokens=30)
    assert driver.ids(2) == alone(2, range(60, 96), max_tokens=4)


def test_13_preempted_twice_no_token_and_no_logprob_is_doubled_or_missing() -> None:
    driver = Driver(block_size=2, total_blocks=32)
    sampling = SamplingSpec(seed=7, logprobs=2)
    for attempt_id in (1, 2, 3):
        driver.submit(attempt_id, range(20, 20 + attempt_id), sampling=sampling, max_tokens=40)
    driver.run()
    assert max(driver.sequence(attempt_id).preemptions for attempt_id in (1, 2, 3)) >= 2
    for attempt_id in (1, 2, 3):
        quiet = Driver()
        quiet.submit(attempt_id, range(20, 20 + attempt_id), sampling=sampling, max_tokens=40)
        quiet.run()
        assert driver.ids(attempt_id) == quiet.ids(attempt_id)
        assert driver.logs[attempt_id, 0].logprobs == quiet.logs[attempt_id, 0].logprobs


def test_11_what_finds_no_place_ends_as_a_typed_error_and_never_waits_for_ever() -> None:
    driver = Driver(limits=Limits(max_running=1, queue_timeout_s=30.0))
    driver.submit(1, max_tokens=100)
    driver.step()
    driver.submit(2)
    driver.submit(3, choices=(ChoiceStart(0, (5, 6)),))
    assert driver.core.next_deadline == driver.now + 30
    driver.now += 30
    driver.step()
    error = driver.end(2).error
    assert error is not None
    assert error.code is ErrorCode.QUEUE_TIMEOUT
    driver.run()
    assert driver.end(1).reason is FinishReason.LENGTH
    assert driver.end(3).reason is FinishReason.LENGTH, "a continuation has waited once already"
    driver.assert_idle()


@pytest.mark.parametrize(("over", "served"), [(-1, True), (0, False), (1, False)])
def test_14_prompts_around_the_context_length(over: int, served: bool) -> None:
    driver = Driver(context_length=64)
    prompt = (20,) * (64 + over)
    if served:
        driver.submit(1, prompt, max_tokens=100)
        driver.run()
        assert driver.end(1).token_offset == 1
        assert driver.end(1).reason is FinishReason.LENGTH
    else:
        with pytest.raises(InvalidRequest):
            driver.submit(1, prompt)


def test_15_a_chunked_prefill_does_not_end_a_request_after_its_first_chunk() -> None:
    driver = Driver(limits=Limits(max_running=1, max_step_tokens=8))
    driver.submit(1, range(20, 50), max_tokens=1)
    driver.step()
    assert driver.sequence(1).phase is SequencePhase.PREFILL
    driver.run()
    assert driver.end(1).token_offset == 1


def test_19_tenants_never_hit_each_other_s_prefixes() -> None:
    driver = Driver(block_size=4)
    for attempt_id, tenant in ((1, "a"), (2, "b"), (3, "a")):
        driver.submit(attempt_id, range(20, 41), tenant=tenant)
        driver.run()
    assert [driver.cached(attempt_id) for attempt_id in (1, 2, 3)] == [0, 0, 20]


def test_20_the_same_request_fifty_times_among_other_traffic_has_one_output() -> None:
    driver = Driver(block_size=4, total_blocks=64, limits=Limits(max_running=8, max_waiting=10, max_step_tokens=16))
    outputs = set()
    for round_number in range(50):
        first = 10 * round_number + 1
        driver.submit(first, sampling=SamplingSpec(seed=5), max_tokens=20)
        for attempt_id in range(first + 1, first + 1 + round_number % 5):
            driver.submit(attempt_id, range(20, 20 + attempt_id % 40 + 1), max_tokens=30)
        for _ in range(5):
            driver.step()
        driver.abort(first + 1)
        driver.run()
        outputs.add(tuple(driver.ids(first)))
    assert len(outputs) == 1


def test_21_any_of_several_eos_ids_ends_unless_ignored_and_not_below_min_tokens() -> None:
    several = {"eos_token_ids": (5, 2, 9), "eos_after": lambda prompt, spec: 0}
    ends, ignores, waits = Driver(**several), Driver(**several), Driver(**several)
    ends.submit(1)
    ends.run()
    assert (ends.end(1).stop, ends.end(1).token_offset) == (EndOfText(5), 1)
    ignores.submit(1, ignore_eos=True)
    ignores.run()
    assert ignores.end(1).reason is FinishReason.LENGTH
    waits.submit(1, min_tokens=4)
    waits.run()
    assert waits.end(1).token_offset == 5
    assert not {5, 2, 9} & set(waits.ids(1)[:4])
