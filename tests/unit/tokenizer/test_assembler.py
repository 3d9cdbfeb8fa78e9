from __future__ import annotations

import pytest

from services.protocol.events import ErrorCode, FinishReason
from services.tokenizer.assembler import MAX_GAPS, EngineEnd, TextBatch, TextFinish, TextStart
from services.tokenizer.effects import Finished, Resubscribe, SendRelease, Wake
from services.tokenizer.state import EnginePhase
from tests.unit.tokenizer.world import Caller, World


@pytest.fixture
def world() -> World:
    world = World()
    world.connect()
    return world


def running(world: World, n: int = 1) -> Caller:
    """A request that the scheduler has accepted."""
    caller = world.open(n=n)
    assert caller is not None
    world.arrive_submit(world.submits[0])
    world.arrive_answer(0)
    while world.pipe:
        world.pump()
    return caller


def row(at: int, *ids: int, text: str, text_offset: int, sequence: int = 1) -> TextBatch:
    return TextBatch(
        sequences=[sequence],
        token_offsets=[at],
        token_counts=[len(ids)],
        token_ids=ids,
        text_offsets=[text_offset],
        texts=[text],
    )


def test_an_event_that_overtakes_submits_answer_proves_acceptance(world: World) -> None:
    caller = world.open()
    assert caller is not None
    world.arrive_submit(world.submits[0])
    world.pump()
    assert caller.answers == ["accepted"]
    world.arrive_answer(0)
    assert caller.answers == ["accepted"]


def test_an_engines_end_in_the_same_message_counts_before_the_finish(world: World) -> None:
    caller = running(world)
    assert world.route is not None
    finish = TextFinish(1, 0, 0, FinishReason.STOP)
    effects = world.route.apply(TextBatch(finishes=[finish], engine_ends=[EngineEnd(1, 2)]), 101.0)
    assert not [effect for effect in effects if isinstance(effect, SendRelease)]
    assert caller.entry.attempts[0].phase is EnginePhase.ENDED
    assert caller.entry.log.usage is not None
    assert caller.entry.log.usage.cached_prompt_tokens == 2


def test_a_repeated_row_wakes_nobody_and_is_counted(world: World) -> None:
    running(world)
    assert world.route is not None
    assert any(isinstance(effect, Wake) for effect in world.route.apply(row(0, 5, 6, text="ab", text_offset=0), 1.0))
    assert world.route.apply(row(0, 5, 6, text="ab", text_offset=0), 1.0) == []
    assert world.route.repeated_tokens == 2


def test_a_row_that_overlaps_brings_only_what_is_new(world: World) -> None:
    caller = running(world)
    assert world.route is not None
    world.perform(world.route.apply(row(0, 5, 6, text="ab", text_offset=0), 1.0))
    world.perform(world.route.apply(row(1, 6, 7, text="bc", text_offset=1), 1.0))
    assert caller.entry.log.choices[0].token_ids == [5, 6, 7]
    assert caller.entry.log.choices[0].text_from(0) == "abc"


@pytest.mark.parametrize(
    "batch",
    [
        row(1, 5, text="b", text_offset=0),
        row(0, 5, text="b", text_offset=1),
        row(0, 5, text="b", text_offset=0, sequence=99),
        TextBatch(finishes=[TextFinish(1, 0, 3, FinishReason.STOP)]),
        TextBatch(finishes=[TextFinish(99, 0, 0, FinishReason.STOP)]),
        TextBatch(engine_ends=[EngineEnd(99, 0)]),
        TextBatch(sequences=[1, 1], token_offsets=[0], token_ids=[5], text_offsets=[0], texts=["a"]),
    ],
)
def test_what_the_call_left_out_ends_the_call_and_not_the_request(world: World, batch: TextBatch) -> None:
    caller = running(world)
    assert world.route is not None
    assert isinstance(world.route.apply(batch, 1.0)[-1], Resubscribe)
    assert not caller.entry.completed


def test_a_start_for_a_choice_that_the_request_does_not_have_ends_the_call(world: World) -> None:
    attempt = running(world).entry.attempts[0]
    assert world.route is not None
    effects = world.route.apply(TextBatch(starts=[TextStart(5, attempt.attempt_id, 1)]), 1.0)
    assert [type(effect) for effect in effects] == [Resubscribe]


def test_a_gap_that_comes_again_in_every_call_ends_the_request(world: World) -> None:
    caller = running(world)
    for _ in range(MAX_GAPS):
        assert world.route is not None
        world.perform(world.route.apply(row(1, 5, text="b", text_offset=0), 1.0))
        world.connect()
        while world.pipe:
            world.pump()
        assert not caller.entry.completed
    assert world.route is not None
    world.perform(world.route.apply(row(1, 5, text="b", text_offset=0), 1.0))
    finish = caller.entry.log.choices[0].finish
    assert finish is not None
    assert finish.error is not None
    assert finish.error.code is ErrorCode.INTEGRITY


@pytest.mark.parametrize(
    "batch",
    [
        row(0, 9, text="a", text_offset=0),
        row(0, 5, text="z", text_offset=0),
        TextBatch(finishes=[TextFinish(1, 0, 1, FinishReason.STOP)]),
        TextBatch(finishes=[TextFinish(1, 1, 0, FinishReason.STOP)]),
    ],
)
def test_another_account_of_known_output_ends_every_choice_and_releases(world: World, batch: TextBatch) -> None:
    caller = running(world, n=2)
    assert world.route is not None
    world.perform(world.route.apply(row(0, 5, text="a", text_offset=0), 1.0))
    effects = world.route.apply(batch, 1.0)
    world.perform(effects)
    assert [type(effect) for effect in effects].count(Finished) == 1
    assert world.spoiled == [caller.entry]
    for log in caller.entry.log.choices:
        assert log.finish is not None
        assert log.finish.reason is FinishReason.ERROR
    assert list(world.releases) == [caller.entry.attempts[0].attempt_id]


def test_one_request_that_is_spoiled_does_not_disturb_its_neighbour_in_the_message(world: World) -> None:
    first, second = running(world), world.open("other")
    assert second is not None
    world.arrive_submit(world.submits[0])
    world.pump()
    assert world.route is not None
    world.perform(world.route.apply(row(0, 5, text="a", text_offset=0), 1.0))
    batch = TextBatch(
        sequences=[1, 2], token_offsets=[0, 0], token_ids=[9, 8], text_offsets=[0, 0], texts=["a", "fine"]
    )
    world.perform(world.route.apply(batch, 1.0))
    assert world.spoiled == [first.entry]
    assert second.entry.log.choices[0].text_from(0) == "fine"


def test_rows_of_an_attempt_that_nobody_knows_are_passed_over_and_it_is_released(world: World) -> None:
    assert world.route is not None
    assert world.route.apply(TextBatch(starts=[TextStart(5, 1234, 0)]), 1.0) == [SendRelease("s", 1234)]
    assert world.route.apply(row(7, 5, text="b", text_offset=9, sequence=5), 1.0) == []
    assert world.route.apply(TextBatch(released_attempt_ids=[1234]), 1.0) == []


def test_what_comes_after_we_ended_a_request_ourselves_changes_nothing(world: World) -> None:
    caller = running(world)
    world.abort("r")
    world.pass_time(1.5)
    assert caller.entry.completed
    assert world.route is not None
    world.perform(world.route.apply(row(0, 5, text="a", text_offset=0), 1.0))
    world.perform(world.route.apply(TextBatch(finishes=[TextFinish(1, 1, 1, FinishReason.STOP)]), 1.0))
    assert world.spoiled == []
    finish = caller.entry.log.choices[0].finish
    assert finish is not None
    assert finish.reason is FinishReason.ABORTED
