from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.protocol.events import FinishReason
from services.protocol.sender import MAX_BATCH_BYTES
from services.runtime.errors import Superseded, Unavailable
from services.scheduler import publisher as publishing
from services.scheduler import wire
from services.scheduler.call import REPLAY_SLICE_BYTES, Call, Rows
from services.scheduler.engine.api import SamplingSpec
from services.scheduler.submission import ChoiceStart, Route, TextPlan
from services.scheduler.token_log import End
from tests.unit.scheduler.driver import ROUTE, Driver


class Reader:
    """What a receiver makes of one call: it checks offsets and order as the contract promises them."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.names: dict[int, tuple[int, int]] = {}
        self.ids: dict[tuple[int, int], list[int]] = defaultdict(list)
        self.logprobs: dict[tuple[int, int], int] = defaultdict(int)
        self.ends: dict[tuple[int, int], End] = {}
        self.released: list[int] = []
        self.messages = 0

    def take(self) -> Rows | None:
        rows = self.call.take()
        if rows is not None:
            self.messages += 1
            assert wire.tokens_to_wire(rows).ByteSize() <= MAX_BATCH_BYTES + REPLAY_SLICE_BYTES
            self._read(rows)
        return rows

    def take_all(self) -> None:
        while self.take() is not None:
            pass

    def _read(self, rows: Rows) -> None:
        for number, log in rows.starts:
            assert number not in self.names, "a number is used once"
            self.names[number] = (log.attempt_id, log.choice)
        start = 0
        columns = zip(rows.sequences, rows.token_offsets, rows.token_counts, strict=True)
        for number, offset, count in columns:
            name = self.names[number]
            assert name not in self.ends, "nothing comes after an end"
            assert offset == len(self.ids[name]), "no hole, no repetition"
            assert count > 0
            self.ids[name] += rows.token_ids[start : start + count]
            start += count
        assert start == len(rows.token_ids)
        for row, logprobs in rows.logprobs:
            assert len(logprobs) == rows.token_counts[row]
            self.logprobs[self.names[rows.sequences[row]]] += len(logprobs)
        for number, log in rows.ends:
            end = log.end
            assert end is not None
            name = self.names[number]
            assert name not in self.ends
            assert end.token_offset == len(self.ids[name])
            self.ends[name] = end
        self.released += rows.released


def open_reader(driver: Driver, generation: int = 1) -> Reader:
    return Reader(driver.publisher.open(ROUTE, generation))


def test_each_step_s_tokens_come_once_in_one_message() -> None:
    driver = Driver()
    reader = open_reader(driver)
    for attempt_id in (1, 2, 3):
        driver.submit(attempt_id)
    reader.take()
    assert sorted(reader.names.values()) == [(1, 0), (2, 0), (3, 0)]
    while driver.core.has_work:
        driver.step()
        reader.take()
        assert reader.take() is None
    assert {name: reader.ids[name] for name in driver.logs} == {name: driver.ids(*name) for name in driver.logs}
    assert all(end.reason is FinishReason.LENGTH for end in reader.ends.values())
    assert reader.messages == 9


def test_a_sequence_is_announced_before_its_first_token() -> None:
    driver = Driver()
    reader = open_reader(driver)
    driver.submit(1)
    rows = reader.take()
    assert rows is not None
    assert [log.attempt_id for _, log in rows.starts] == [1]
    assert rows.token_ids == []


def test_a_slow_reader_gets_the_same_in_fewer_messages() -> None:
    driver = Driver()
    reader = open_reader(driver)
    driver.submit(1, max_tokens=50)
    driver.run()
    reader.take_all()
    assert reader.messages == 1
    assert reader.ids[1, 0] == driver.ids(1)


def test_a_new_call_starts_every_sequence_at_token_0_the_ended_ones_too() -> None:
    driver = Driver()
    first = open_reader(driver, 1)
    driver.submit(1, max_tokens=3)
    driver.run()
    driver.submit(2, max_tokens=50)
    for _ in range(5):
        driver.step()
        first.take()
    second = open_reader(driver, 2)
    driver.step()
    second.take_all()
    assert second.ids == {(1, 0): driver.ids(1), (2, 0): driver.ids(2)}
    assert list(second.ends) == [(1, 0)]


def test_an_older_call_ends_and_a_lower_generation_is_refused() -> None:
    driver = Driver()
    old = open_reader(driver, 3)
    open_reader(driver, 4)
    with pytest.raises(Superseded):
        old.take()
    with pytest.raises(Superseded):
        open_reader(driver, 3)


def test_a_lower_generation_is_refused_after_the_higher_call_has_ended() -> None:
    driver = Driver()
    driver.publisher.close(driver.publisher.open(ROUTE, 5))
    with pytest.raises(Superseded):
        open_reader(driver, 4)
    open_reader(driver, 5)


def test_closing_a_superseded_call_does_not_touch_the_newer_one() -> None:
    driver = Driver()
    old = driver.publisher.open(ROUTE, 1)
    new = open_reader(driver, 2)
    driver.publisher.close(old)
    driver.submit(1)
    driver.run()
    new.take_all()
    assert new.ids[1, 0] == driver.ids(1)


def test_routes_are_kept_apart() -> None:
    driver = Driver()
    other = Route("tokenizer-2", 7)
    mine, theirs = open_reader(driver), Reader(driver.publisher.open(other, 1))
    restarted = Reader(driver.publisher.open(Route(ROUTE.tokenizer, 8), 1))
    driver.submit(1)
    driver.submit(2, route=other)
    driver.run()
    for reader in (mine, theirs, restarted):
        reader.take_all()
    assert (list(mine.ids), list(theirs.ids), list(restarted.ids)) == ([(1, 0)], [(2, 0)], [])


def test_what_comes_before_a_route_is_opened_is_kept_for_it() -> None:
    driver = Driver()
    driver.submit(1)
    driver.run()
    reader = open_reader(driver)
    reader.take_all()
    assert reader.ids[1, 0] == driver.ids(1)
    assert reader.ends[1, 0].token_offset == 8


def test_a_released_attempt_leaves_its_marker_and_nothing_after_it() -> None:
    driver = Driver()
    reader = open_reader(driver)
    driver.submit(1)
    driver.submit(2)
    driver.step()
    driver.release(1)
    reader.take()
    assert reader.released == [1]
    assert (1, 0) not in reader.ids
    driver.run()
    reader.take_all()
    assert (1, 0) not in reader.ids
    assert reader.ids[2, 0] == driver.ids(2)


def test_a_release_in_the_middle_of_a_step_lets_no_later_row_through() -> None:
    driver = Driver()
    reader = open_reader(driver)
    driver.submit(1)
    driver.step()
    reader.take()
    driver.begin()
    driver.release(1)
    driver.finish()
    rows = reader.take()
    assert rows is not None
    assert (rows.released, rows.sequences, rows.ends) == ([1], [], [])


def test_a_released_attempt_is_not_replayed() -> None:
    driver = Driver()
    driver.submit(1)
    driver.submit(2)
    driver.run()
    reader = open_reader(driver)
    driver.release(1)
    reader.take_all()
    assert list(reader.ids) == [(2, 0)]
    assert reader.released == [1]
    again = open_reader(driver, 2)
    again.take_all()
    assert list(again.ids) == [(2, 0)]


def test_the_marker_of_an_unknown_attempt_goes_to_every_open_route() -> None:
    driver = Driver()
    readers = [open_reader(driver), Reader(driver.publisher.open(Route("tokenizer-2", 1), 1))]
    driver.release(77)
    for reader in readers:
        reader.take_all()
        assert reader.released == [77]


def test_a_continuation_s_output_so_far_is_sent_from_token_0() -> None:
    driver = Driver()
    reader = open_reader(driver)
    driver.submit(1, choices=(ChoiceStart(0, (30, 31, 32)),))
    reader.take()
    assert reader.ids[1, 0] == [30, 31, 32]
    driver.run()
    reader.take_all()
    assert reader.ids[1, 0] == driver.ids(1)


def test_live_sequences_go_before_a_replay_and_the_replay_in_slices() -> None:
    driver = Driver(context_length=60_000, total_blocks=8192)
    prior = tuple(range(20, 20 + 40_000))
    for attempt_id in (1, 2):
        driver.submit(attempt_id, choices=(ChoiceStart(0, prior),), max_tokens=40_000)
    reader = open_reader(driver)
    driver.submit(3)
    driver.step()
    rows = reader.take()
    assert rows is not None
    assert rows.starts[0][1].attempt_id == 3
    assert len(reader.ids[3, 0]) == 1
    assert len(rows.token_ids) < 20_000
    driver.step()
    reader.take()
    assert len(reader.ids[3, 0]) == 2
    reader.take_all()
    assert reader.ids[1, 0] == reader.ids[2, 0] == list(prior)
    assert reader.messages > 5


def test_a_sequence_that_grows_while_it_is_replayed_misses_nothing() -> None:
    driver = Driver(context_length=60_000, total_blocks=8192)
    driver.submit(1, choices=(ChoiceStart(0, tuple(range(20, 30_020))),), max_tokens=30_050)
    reader = open_reader(driver)
    while driver.core.has_work:
        driver.step()
        reader.take()
    reader.take_all()
    assert reader.ids[1, 0] == driver.ids(1)
    assert (1, 0) in reader.ends


def test_messages_stay_below_their_bound_with_many_logprobs_and_long_stops() -> None:
    driver = Driver(context_length=20_000)
    reader = open_reader(driver)
    plan = TextPlan(stop=("é" * 1024,) * 64)
    for attempt_id in range(1, 9):
        driver.submit(
            attempt_id,
            sampling=SamplingSpec(seed=1, logprobs=20),
            max_tokens=1500,
            text=plan,
            ignore_eos=True,
        )
    driver.run()
    reader.take_all()
    assert reader.messages > 1
    for attempt_id in range(1, 9):
        assert reader.ids[attempt_id, 0] == driver.ids(attempt_id)
        assert reader.logprobs[attempt_id, 0] == 1500


def test_a_call_ends_when_the_process_stops_but_only_after_everything_was_taken() -> None:
    driver = Driver()
    reader = open_reader(driver)
    driver.submit(1)
    driver.abort(1)
    driver.publisher.close_all()
    reader.take()
    assert reader.ends[1, 0].reason is FinishReason.ABORTED
    with pytest.raises(Unavailable):
        reader.take()


def test_quiet_routes_are_forgotten_beyond_their_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(publishing, "MAX_QUIET_ROUTES", 3)
    driver = Driver()
    driver.submit(1)
    for epoch in range(100, 120):
        driver.publisher.close(driver.publisher.open(Route("t", epoch), 1))
    assert len(driver.publisher._lines) <= 4
    reader = open_reader(driver)
    reader.take()
    assert list(reader.names.values()) == [(1, 0)]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.sampled_from(["submit", "step", "step", "take", "take", "move", "drop", "abort", "release"]), max_size=60
    ),
)
def test_whatever_happens_a_reader_sees_each_log_whole_in_order_and_once(events: list[str]) -> None:
    driver = Driver()
    generation, submitted = 1, 0
    reader: Reader | None = open_reader(driver)
    for event in events:
        live = [a for a in driver.core.attempts if a % 2]
        if event == "submit":
            submitted += 1
            driver.submit(submitted, range(20, 21 + submitted % 7), choices=(ChoiceStart(0), ChoiceStart(1)))
        elif event == "step" and driver.core.has_work:
            driver.step()
        elif event == "take" and reader is not None:
            reader.take()
        elif event == "move":
            generation += 1
            reader = open_reader(driver, generation)
        elif event == "drop" and reader is not None:
            driver.publisher.close(reader.call)
            reader = None
        elif event in ("abort", "release") and live:
            getattr(driver, event)(live[0])
    driver.run()
    reader = reader or open_reader(driver, generation + 1)
    reader.take_all()
    for name, log in driver.logs.items():
        if log.attempt_id in driver.core.attempts:
            assert reader.ids[name] == log.ids.tolist()
            assert reader.ends[name] == log.end
