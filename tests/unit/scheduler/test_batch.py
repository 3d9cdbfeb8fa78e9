import pytest

from services.protocol.events import FinishReason
from services.scheduler.admission import Limits
from services.scheduler.state import SequencePhase
from services.scheduler.submission import ChoiceStart
from tests.unit.scheduler.driver import Driver, alone


def tight(total_blocks: int, **changes: int) -> Driver:
    return Driver(block_size=4, total_blocks=total_blocks, limits=Limits(**changes))


def test_sequences_join_and_leave_at_every_step() -> None:
    driver = Driver()
    driver.submit(1, max_tokens=3)
    assert len(driver.step().slices) == 1
    driver.submit(2)
    assert len(driver.step().slices) == 2
    driver.step()
    assert driver.end(1).reason is FinishReason.LENGTH
    assert len(driver.step().slices) == 1


def test_a_long_prompt_is_computed_in_chunks_beside_decoding_neighbours() -> None:
    driver = Driver(limits=Limits(max_running=4, max_step_tokens=10))
    driver.submit(1, max_tokens=50)
    driver.step()
    driver.submit(2, range(20, 45))
    chunks = [[len(part.token_ids) for part in driver.step().slices] for _ in range(3)]
    assert chunks == [[1, 9], [1, 9], [1, 7]]
    assert len(driver.ids(2)) == 1
    assert len(driver.ids(1)) == 4


def test_only_the_last_chunk_samples_and_chunks_join_to_the_prompt() -> None:
    driver = Driver(limits=Limits(max_running=1, max_step_tokens=7))
    prompt = tuple(range(20, 45))
    driver.submit(1, prompt)
    parts = [driver.step().slices[0] for _ in range(4)]
    assert [part.samples for part in parts] == [False, False, False, True]
    assert tuple(token for part in parts for token in part.token_ids) == prompt
    assert [part.start for part in parts] == [0, 7, 14, 21]


def test_chunking_does_not_change_the_output() -> None:
    prompt = tuple(range(20, 60))
    for budget in (1, 3, 16, 512):
        driver = Driver(limits=Limits(max_running=1, max_step_tokens=budget))
        driver.submit(1, prompt)
        driver.run()
        assert driver.ids(1) == alone(1, prompt)


def test_no_step_exceeds_the_token_budget_or_the_running_limit() -> None:
    driver = Driver(limits=Limits(max_running=5, max_step_tokens=16))
    for attempt_id in range(1, 30):
        driver.submit(attempt_id, range(20, 20 + attempt_id))
    while driver.core.has_work:
        plan = driver.step()
        assert plan.tokens == sum(len(part.token_ids) for part in plan.slices) <= 16
        assert driver.core.load().running_sequences <= 5
    assert all(driver.ids(attempt_id) == alone(attempt_id, range(20, 20 + attempt_id)) for attempt_id in range(1, 30))


def test_first_come_first_served() -> None:
    driver = Driver(limits=Limits(max_running=1))
    for attempt_id in (1, 2, 3):
        driver.submit(attempt_id)
    driver.run()
    ended: list[int] = []
    driver = Driver(limits=Limits(max_running=1))
    for attempt_id in (1, 2, 3):
        driver.submit(attempt_id)
    while driver.core.has_work:
        driver.step()
        ended += [a for a, _ in driver.logs if driver.logs[a, 0].end is not None and a not in ended]
    assert ended == [1, 2, 3]


def test_slices_tell_positions_blocks_and_output_positions_exactly() -> None:
    driver = Driver(block_size=4, total_blocks=16)
    driver.submit(1, range(20, 26), max_tokens=6)
    driver.step()
    for produced in range(1, 6):
        part, last_id = driver.begin().slices[0], driver.ids(1)[-1]
        assert part.start == 5 + produced
        assert part.output_position == produced
        assert len(part.block_table) == -(-(part.start + 1) // 4)
        assert len(set(part.block_table)) == len(part.block_table)
        driver.finish()
        assert tuple(part.token_ids) == (last_id,)


def test_two_sequences_never_share_a_block() -> None:
    driver = tight(40)
    for attempt_id in range(1, 6):
        driver.submit(attempt_id)
    while driver.core.has_work:
        blocks = [block for part in driver.begin().slices for block in part.block_table]
        assert len(blocks) == len(set(blocks))
        driver.finish()


def test_when_the_pool_runs_dry_the_latest_arrival_gives_way() -> None:
    driver = tight(8)
    driver.submit(1, range(20, 28), max_tokens=20)
    driver.submit(2, range(30, 38), max_tokens=20)
    phases = []
    while driver.core.has_work:
        driver.step()
        phases.append((driver.sequence(1).phase, driver.sequence(2).phase))
    assert (SequencePhase.DECODE, SequencePhase.WAITING) in phases
    assert driver.sequence(1).preemptions == 0
    assert driver.sequence(2).preemptions > 0
    driver.assert_idle()


@pytest.mark.parametrize("total_blocks", [7, 8, 10, 14])
def test_a_tiny_pool_gives_the_same_output_as_a_large_one(total_blocks: int) -> None:
    driver = tight(total_blocks)
    for attempt_id in range(1, 9):
        driver.submit(attempt_id, range(20, 20 + attempt_id), max_tokens=20)
    driver.run()
    for attempt_id in range(1, 9):
        assert driver.ids(attempt_id) == alone(attempt_id, range(20, 20 + attempt_id), max_tokens=20)
    assert sum(driver.sequence(attempt_id).preemptions for attempt_id in range(1, 9)) > 0
    driver.assert_idle()


def test_a_preempted_sequence_waits_before_all_that_came_later() -> None:
    driver = tight(8, max_running=2)
    for attempt_id in (1, 2, 3):
        driver.submit(attempt_id, range(20, 28), max_tokens=20)
    admitted: list[int] = []
    while driver.core.has_work:
        admitted += [sequence.log.attempt_id for sequence in driver.step().admitted]
    assert admitted.index(3) > max(place for place, attempt_id in enumerate(admitted) if attempt_id == 2)
    assert admitted.count(2) == 1 + driver.sequence(2).preemptions > 1


def test_a_newcomer_leaves_a_block_for_each_running_sequence() -> None:
    driver = tight(6)
    driver.submit(1, range(20, 28), max_tokens=12)
    driver.step()
    driver.submit(2, range(60, 76), max_tokens=4)  # four blocks, of four free ones
    driver.step()
    assert driver.sequence(2).phase is SequencePhase.WAITING
    driver.run()
    assert driver.sequence(2).preemptions == 0


def test_a_sequence_alone_may_fill_the_whole_pool() -> None:
    driver = tight(4)
    driver.submit(1, range(20, 30), max_tokens=None)
    driver.run()
    assert len(driver.ids(1)) == 7  # 16 positions, and a last token that is never computed
    driver.assert_idle()


def test_the_engine_is_told_of_each_preemption_before_the_sequence_returns() -> None:
    driver = tight(8)
    driver.submit(1, range(20, 28), max_tokens=20)
    driver.submit(2, range(30, 38), max_tokens=20)
    opened: set[int] = set()
    reopened = []
    while driver.core.has_work:
        plan = driver.begin()
        opened -= set(plan.closes)
        for opening in plan.opens:
            assert opening.key not in opened
            opened.add(opening.key)
            if opening.output_ids:
                reopened.append(opening.output_ids)
        assert {part.key for part in plan.slices} <= opened
        driver.finish()
    assert reopened
    assert all(tuple(driver.ids(2)[: len(ids)]) == ids for ids in reopened)
    assert not opened


def test_a_preempted_sequence_can_be_aborted_while_it_waits_again() -> None:
    driver = tight(8)
    driver.submit(1, range(20, 28), max_tokens=20)
    driver.submit(2, range(30, 38), max_tokens=20)
    while driver.sequence(2).phase is not SequencePhase.WAITING or not driver.sequence(2).preemptions:
        driver.step()
    produced = len(driver.ids(2))
    driver.abort(2)
    assert driver.end(2).token_offset == produced
    driver.run()
    driver.assert_idle()


def test_choices_of_one_attempt_run_side_by_side() -> None:
    driver = Driver()
    driver.submit(1, choices=tuple(ChoiceStart(number) for number in range(4)))
    assert len(driver.step().slices) == 4


def test_a_continuation_goes_before_prompts_that_came_before_it_and_wait() -> None:
    driver = Driver(limits=Limits(max_running=1))
    for attempt_id in (1, 2):
        driver.submit(attempt_id, max_tokens=2)
    driver.step()
    driver.now += 5.0
    driver.submit(3, choices=(ChoiceStart(0, (7, 8)),), max_tokens=4)
    admitted: list[int] = []
    while driver.core.has_work:
        admitted += [sequence.log.attempt_id for sequence in driver.step().admitted]
    assert admitted == [3, 2]


def test_while_blocks_abound_no_draft_is_cut_short_even_in_a_step_planned_ahead() -> None:
    driver = Driver(draft_tokens=7, block_size=16, total_blocks=100)
    for attempt_id in (1, 2, 3):
        driver.submit(attempt_id, range(20, 25 + attempt_id), max_tokens=100)
    driver.step()
    most = {driver.sequence(attempt_id).log.key: 5 + attempt_id + 100 - 1 for attempt_id in (1, 2, 3)}
    while driver.core.has_work:
        plan = driver.begin()
        driver.look_ahead()
        driver.finish()
        for part in plan.slices:
            assert part.draft_room(16) >= min(7, most[part.key] - part.start - 2)
            assert len(part.block_table) <= -(-most[part.key] // 16)
    driver.assert_idle()


@pytest.mark.parametrize(("total_blocks", "held"), [(3, 1), (4, 2)])
def test_no_block_is_held_for_guesses_where_they_are_scarce(total_blocks: int, held: int) -> None:
    driver = Driver(draft_tokens=7, block_size=8, total_blocks=total_blocks)
    driver.submit(1, max_tokens=20)
    driver.step()
    (part,) = driver.step().slices
    assert len(part.block_table) == held
