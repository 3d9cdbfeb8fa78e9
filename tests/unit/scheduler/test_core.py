from collections.abc import Sequence

import pytest

from services.protocol.events import EndOfText, ErrorCode, FinishReason, StopToken
from services.runtime.errors import InvalidRequest, Overloaded, PreconditionFailed
from services.scheduler.admission import Limits
from services.scheduler.effects import Ended, Opened, Progressed, Released
from services.scheduler.engine.api import (
    Answer,
    Failed,
    FailureKind,
    Logprobs,
    Sampled,
    SamplingSpec,
    Slice,
    Speculated,
)
from services.scheduler.engine.fake import FakeEngine
from services.scheduler.state import AttemptPhase, SequencePhase
from services.scheduler.submission import ChoiceStart
from tests.unit.scheduler.driver import ROUTE, Driver, alone


def eos_at(position: int) -> Driver:
    return Driver(eos_after=lambda prompt, spec: position)


def test_a_request_runs_to_its_limit_and_leaves_nothing() -> None:
    driver = Driver()
    driver.submit(1)
    driver.run()
    assert len(driver.ids(1)) == 8
    assert (driver.end(1).reason, driver.end(1).token_offset) == (FinishReason.LENGTH, 8)
    assert driver.steps == 9  # a prefill that samples, seven decodes, and one that tells the engine
    driver.assert_idle()


def test_end_of_text_ends_with_its_token_in_the_log() -> None:
    driver = eos_at(3)
    driver.submit(1)
    driver.run()
    assert driver.ids(1)[-1] == 2
    assert driver.end(1).reason is FinishReason.STOP
    assert driver.end(1).stop == EndOfText(2)
    assert driver.end(1).token_offset == 4


def test_ignore_eos_goes_on_to_the_limit() -> None:
    driver = eos_at(3)
    driver.submit(1, ignore_eos=True)
    driver.run()
    assert driver.end(1).reason is FinishReason.LENGTH
    assert driver.ids(1)[3:] == [2] * 5


def test_a_stop_token_ends_even_where_eos_is_ignored() -> None:
    third = alone(1)[2]
    driver = Driver()
    driver.submit(1, ignore_eos=True, stop_token_ids=(third,))
    driver.run()
    assert driver.end(1).stop == StopToken(third)
    assert driver.end(1).token_offset == len(driver.ids(1)) <= 3


def test_an_id_that_is_both_stop_and_eos_is_told_as_the_stop_that_was_asked_for() -> None:
    driver = eos_at(0)
    driver.submit(1, stop_token_ids=(2,))
    driver.run()
    assert driver.end(1).stop == StopToken(2)


def test_the_text_plan_names_every_token_that_ends_the_sequence() -> None:
    """The detokenizer holds such a token's text back until it knows; without the names a stop token's text leaks."""
    driver = Driver()
    driver.submit(1, stop_token_ids=(99,))
    driver.submit(2, stop_token_ids=(99,), ignore_eos=True)
    assert set(driver.logs[1, 0].text.end_token_ids) == {99, *driver.engine.info.eos_token_ids}
    assert driver.logs[2, 0].text.end_token_ids == (99,)


def test_a_stop_at_the_last_allowed_token_is_a_stop_and_not_a_length() -> None:
    driver = eos_at(7)
    driver.submit(1, max_tokens=8)
    driver.run()
    assert driver.end(1).reason is FinishReason.STOP


@pytest.mark.parametrize("min_tokens", [1, 3, 5])
def test_no_end_of_text_takes_effect_below_min_tokens(min_tokens: int) -> None:
    driver = eos_at(0)
    driver.submit(1, min_tokens=min_tokens)
    driver.run()
    assert 2 not in driver.ids(1)[:min_tokens]
    assert driver.end(1).token_offset == min_tokens + 1
    assert driver.end(1).stop == EndOfText(2)


def test_min_tokens_suppresses_stop_tokens_too_and_max_tokens_still_holds() -> None:
    driver = eos_at(0)
    driver.submit(1, min_tokens=8, max_tokens=8, stop_token_ids=(5,))
    driver.run()
    assert driver.end(1).reason is FinishReason.LENGTH
    assert not {2, 5} & set(driver.ids(1))


def test_max_tokens_one_gives_one_token() -> None:
    driver = Driver()
    driver.submit(1, max_tokens=1)
    driver.run()
    assert len(driver.ids(1)) == 1
    assert driver.end(1).reason is FinishReason.LENGTH


def test_the_context_ends_a_sequence_as_length() -> None:
    driver = Driver(context_length=32)
    driver.submit(1, range(20, 30), max_tokens=None)
    driver.run()
    assert driver.end(1).token_offset == 22
    assert driver.end(1).reason is FinishReason.LENGTH


def test_the_same_submit_again_changes_nothing_while_it_runs_and_after_its_end() -> None:
    driver = Driver()
    assert isinstance(driver.submit(1)[0], Opened)
    driver.step()
    assert driver.submit(1) == []
    driver.run()
    assert driver.submit(1) == []
    assert driver.core.attempts[1].phase is AttemptPhase.ENDED
    assert driver.core.open_sequences == 0


def test_an_aborted_waiting_sequence_ends_at_once_and_a_second_abort_is_harmless() -> None:
    driver = Driver()
    driver.submit(1)
    effects = driver.abort(1)
    assert [type(effect) for effect in effects] == [Progressed, Ended]
    assert driver.end(1).reason is FinishReason.ABORTED
    assert driver.end(1).token_offset == 0
    assert driver.abort(1) == []
    driver.assert_idle()


def test_an_abort_between_two_steps_frees_the_blocks_at_once() -> None:
    driver = Driver()
    driver.submit(1)
    driver.step()
    assert driver.free < driver.total
    driver.abort(1)
    assert driver.free == driver.total
    assert driver.end(1).token_offset == 1
    driver.run()
    driver.assert_idle()


def test_an_abort_during_a_step_ends_with_that_step_and_its_token_is_dropped() -> None:
    driver = Driver()
    driver.submit(1)
    driver.submit(2)
    driver.step()
    driver.begin()
    assert driver.abort(1) == []
    assert driver.free < driver.total
    driver.finish()
    assert (driver.end(1).reason, driver.end(1).token_offset) == (FinishReason.ABORTED, 1)
    assert len(driver.ids(2)) == 2
    driver.core.check_integrity()


def test_an_abort_may_say_that_it_is_for_a_deadline() -> None:
    driver = Driver()
    driver.submit(1)
    driver.abort(1, reason=FinishReason.DEADLINE)
    assert driver.end(1).reason is FinishReason.DEADLINE


def test_release_forgets_and_a_late_submit_is_refused() -> None:
    driver = Driver()
    driver.submit(1)
    driver.run()
    assert driver.release(1) == [Released(1, ROUTE, [driver.logs[1, 0]])]
    assert driver.core.attempts == {}
    with pytest.raises(PreconditionFailed):
        driver.submit(1)


@pytest.mark.parametrize("event", ["abort", "release"])
def test_abort_or_release_of_an_unknown_attempt_leaves_a_tombstone(event: str) -> None:
    driver = Driver()
    effects = getattr(driver, event)(9)
    assert effects == ([Released(9, None)] if event == "release" else [])
    with pytest.raises(PreconditionFailed):
        driver.submit(9)
    driver.now += driver.core.limits.tombstone_ttl_s
    assert driver.submit(9)


def test_release_during_a_step_drops_everything_but_the_blocks_that_the_step_uses() -> None:
    driver = Driver()
    driver.submit(1)
    driver.step()
    driver.begin()
    driver.release(1)
    assert driver.core.attempts == {}
    assert 1 not in driver.core.attempts
    driver.finish()
    driver.run()
    driver.assert_idle()


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_a_deadline_ends_a_sequence_wherever_it_stands(steps: int) -> None:
    driver = Driver()
    driver.submit(1, deadline_in_s=5.0, max_tokens=100)
    driver.submit(2, max_tokens=100)
    for _ in range(steps):
        driver.step()
    driver.now += 4.9
    driver.step()
    assert driver.logs[1, 0].end is None
    driver.now += 0.1
    driver.step()
    assert driver.end(1).reason is FinishReason.DEADLINE
    assert driver.end(1).token_offset == steps + 1
    driver.run()
    assert driver.end(2).reason is FinishReason.LENGTH


def test_the_core_tells_when_the_next_deadline_is() -> None:
    driver = Driver()
    assert driver.core.next_deadline is None
    driver.submit(1, deadline_in_s=50.0)
    driver.submit(2, deadline_in_s=20.0)
    assert driver.core.next_deadline == driver.now + 20.0


def test_deadlines_of_released_attempts_do_not_pile_up() -> None:
    driver = Driver()
    for attempt_id in range(1, 1001):
        driver.submit(attempt_id, deadline_in_s=1e6)
        driver.release(attempt_id)
    assert len(driver.core._deadlines) <= 65


def test_a_full_queue_refuses_with_a_hint_and_takes_in_again_after_an_end() -> None:
    driver = Driver(limits=Limits(max_running=1, max_waiting=1))
    driver.submit(1)
    driver.submit(2)
    with pytest.raises(Overloaded) as refused:
        driver.submit(3)
    assert refused.value.reason == "QUEUE_FULL"
    assert refused.value.retry_after_s > 0
    driver.abort(1)
    driver.submit(3)


def test_n_choices_are_taken_or_refused_together() -> None:
    driver = Driver(limits=Limits(max_running=2, max_waiting=1))
    driver.submit(1)
    choices = tuple(ChoiceStart(number) for number in range(3))
    with pytest.raises(Overloaded):
        driver.submit(2, choices=choices)
    assert driver.core.open_sequences == 1
    driver.run()
    driver.submit(2, choices=choices)
    assert driver.core.open_sequences == 3


def test_more_choices_than_could_ever_be_open_are_not_told_to_come_again() -> None:
    driver = Driver(limits=Limits(max_running=1, max_waiting=1))
    with pytest.raises(InvalidRequest):
        driver.submit(1, choices=tuple(ChoiceStart(number) for number in range(3)))


def test_a_continuation_is_never_refused_for_load() -> None:
    driver = Driver(limits=Limits(max_running=1, max_waiting=0))
    driver.submit(1)
    driver.submit(2, choices=(ChoiceStart(0, (30,)),))
    driver.run()
    assert len(driver.ids(2)) == 8


def test_ended_but_unreleased_sequences_are_bounded_by_a_refusal() -> None:
    driver = Driver(limits=Limits(max_running=2, max_waiting=0, max_held=3))
    for attempt_id in (1, 2, 3):
        driver.submit(attempt_id)
        driver.run()
    with pytest.raises(Overloaded) as refused:
        driver.submit(4)
    assert refused.value.reason == "HELD_FULL"
    driver.release(2)
    driver.submit(4)


@pytest.mark.parametrize("split", range(1, 8))
def test_a_continuation_goes_on_exactly_where_the_first_scheduler_stopped(split: int) -> None:
    whole = alone(1)
    driver = Driver()
    driver.submit(1, choices=(ChoiceStart(0, tuple(whole[:split])),))
    driver.run()
    assert driver.ids(1) == whole


@pytest.mark.parametrize(
    ("output_ids", "reason"),
    [((30, 2), FinishReason.STOP), ((30,) * 8, FinishReason.LENGTH), ((30,) * 9, FinishReason.LENGTH)],
)
def test_a_continuation_that_has_all_its_output_ends_at_once(output_ids: tuple[int, ...], reason: FinishReason) -> None:
    driver = Driver()
    driver.submit(1, choices=(ChoiceStart(0, output_ids),))
    assert driver.end(1).reason is reason
    assert driver.end(1).token_offset == len(output_ids)
    assert driver.core.attempts[1].phase is AttemptPhase.ENDED
    driver.assert_idle()


def test_logprobs_are_one_per_id_a_continuation_s_own_included() -> None:
    driver = Driver()
    mine = Logprobs(-1.0, (), ())
    driver.submit(
        1,
        sampling=SamplingSpec(seed=1, logprobs=2),
        choices=(ChoiceStart(0, (30,), (mine,)),),
    )
    driver.run()
    logprobs = driver.logs[1, 0].logprobs
    assert logprobs is not None
    assert logprobs[0] == mine
    assert len(logprobs) == len(driver.ids(1)) == 8
    assert all(len(one.top_ids) == 2 for one in logprobs[1:])


def test_a_failed_row_ends_its_sequence_typed_and_no_other() -> None:
    driver = Driver(bad_output_id=99)
    driver.submit(1, (20, 99))
    driver.submit(2)
    driver.run()
    error = driver.end(1).error
    assert error is not None
    assert (driver.end(1).reason, error.code) == (FinishReason.ERROR, ErrorCode.BAD_MODEL_OUTPUT)
    assert driver.ids(2) == alone(2)


@pytest.mark.parametrize("token_id", [-1, 49152, 2**40])
def test_a_token_that_does_not_exist_is_an_error_and_not_output(token_id: int) -> None:
    driver = Driver()
    driver.submit(1)
    driver.submit(2)
    driver.step()
    plan = driver.begin()
    first, second = plan.slices
    driver.core.apply(plan, [Sampled(first.key, token_id), Sampled(second.key, 30)], driver.now)
    assert driver.end(1).reason is FinishReason.ERROR
    assert driver.end(1).token_offset == 1
    assert driver.ids(2)[1:] == [30]


def test_an_engine_that_gives_no_answer_fails_the_sequence_it_forgot() -> None:
    driver = Driver()
    driver.submit(1)
    driver.submit(2)
    driver.step()
    plan = driver.begin()
    driver.core.apply(plan, [Sampled(plan.slices[1].key, 30)], driver.now)
    error = driver.end(1).error
    assert error is not None
    assert error.code is ErrorCode.INTERNAL
    assert driver.ids(2)[1:] == [30]


def test_a_failure_for_a_sequence_that_left_meanwhile_is_nobody_s() -> None:
    driver = Driver()
    driver.submit(1)
    plan = driver.begin()
    driver.abort(1)
    driver.core.apply(plan, [Failed(plan.slices[0].key, FailureKind.INTERNAL, "too late")], driver.now)
    assert driver.end(1).reason is FinishReason.ABORTED


def test_out_of_memory_is_told_as_such() -> None:
    driver = Driver()
    driver.submit(1)
    plan = driver.begin()
    driver.core.apply(plan, [Failed(plan.slices[0].key, FailureKind.OUT_OF_MEMORY, "no memory")], driver.now)
    error = driver.end(1).error
    assert error is not None
    assert error.code is ErrorCode.OUT_OF_MEMORY


def test_every_choice_has_its_own_end() -> None:
    driver = Driver(eos_after=lambda prompt, spec: 2 if spec.choice == 1 else None)
    driver.submit(1, choices=tuple(ChoiceStart(number) for number in (0, 1, 4)))
    driver.run()
    assert [driver.end(1, choice).reason.name for choice in (0, 1, 4)] == ["LENGTH", "STOP", "LENGTH"]
    assert len({tuple(driver.ids(1, choice)) for choice in (0, 1, 4)}) == 3


def test_an_attempt_ends_with_its_last_sequence() -> None:
    driver = Driver(eos_after=lambda prompt, spec: 1 if spec.choice == 1 else None)
    driver.submit(1, choices=(ChoiceStart(0), ChoiceStart(1)))
    for _ in range(3):
        driver.step()
    assert driver.sequence(1, 1).phase is SequencePhase.ENDED
    phases = [driver.core.attempts[1].phase]
    driver.run()
    phases.append(driver.core.attempts[1].phase)
    assert phases == [AttemptPhase.ACCEPTED, AttemptPhase.ENDED]


class GuessingEngine(FakeEngine):
    """Gives what it is told to as the tokens of right guesses, once per sequence, with its second token."""

    further: Sequence[int] = ()

    def step(self, slices: Sequence[Slice]) -> list[Answer]:
        drafts = [
            Speculated(part.key, len(self.further), [Sampled(part.key, token) for token in self.further])
            for part in slices
            if part.output_position == 1
        ]
        return [*super().step(slices), *drafts]


@pytest.mark.parametrize(
    ("further", "ids", "reason"),
    [
        ((30, 31), 8, FinishReason.LENGTH),
        ((30, 31, 32, 33, 34, 35, 36), 8, FinishReason.LENGTH),
        ((30, 2, 32), 4, FinishReason.STOP),
        ((30, 49152, 32), 3, FinishReason.ERROR),
    ],
)
def test_what_guesses_brought_counts_up_to_the_end(further: Sequence[int], ids: int, reason: FinishReason) -> None:
    engine = GuessingEngine()
    engine.further = further
    driver = Driver(engine=engine)
    driver.submit(1)
    while driver.core.has_work:
        driver.begin()
        driver.look_ahead()
        driver.finish()
    assert driver.ids(1)[2:4] == list(further[: ids - 2][:2])
    assert (len(driver.ids(1)), driver.end(1).token_offset, driver.end(1).reason) == (ids, ids, reason)
    driver.core.check_integrity()


def test_guesses_bring_tokens_earlier_and_no_others() -> None:
    driver = Driver(draft_tokens=5)
    driver.submit(1, max_tokens=60)
    driver.run()
    assert driver.ids(1) == alone(1, max_tokens=60)
    assert driver.steps < 40
