"""The law of log and cursor: whatever the deltas, replays and readers, each reader's joined events are the answer."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.protocol.answer import AnswerCursor, AnswerLog, IntegrityError
from services.protocol.events import Completed, Delta, Finish, FinishReason, Usage

Row = tuple[list[int], str]
rows = st.lists(
    st.tuples(st.lists(st.integers(0, 99), max_size=3), st.text(alphabet="aé🙂\n", max_size=4)), max_size=12
)


def write(log: AnswerLog, choice: int, given_rows: list[Row]) -> None:
    tokens = text = 0
    for ids, piece in given_rows:
        log.choices[choice].append(tokens, ids, text, piece)
        tokens, text = tokens + len(ids), text + len(piece)


def end(log: AnswerLog) -> None:
    for choice, choice_log in enumerate(log.choices):
        log.finish(Finish(choice, FinishReason.STOP, len(choice_log.token_ids)))
    log.complete(Usage(1, 0, sum(len(choice_log.token_ids) for choice_log in log.choices)))


def join(events: list[Delta | Finish | Completed], choice: int = 0) -> tuple[list[int], str]:
    deltas = [event for event in events if isinstance(event, Delta) and event.choice == choice]
    return [token_id for delta in deltas for token_id in delta.token_ids], "".join(delta.text for delta in deltas)


@given(rows, st.data())
def test_joined_deltas_are_the_answer_however_the_reader_takes_them(answer: list[Row], data: st.DataObject) -> None:
    log = AnswerLog(1)
    cursor = AnswerCursor(log)
    events: list[Delta | Finish | Completed] = []
    tokens = text = 0
    for ids, piece in answer:
        log.choices[0].append(tokens, ids, text, piece)
        tokens, text = tokens + len(ids), text + len(piece)
        if data.draw(st.booleans()):
            events += cursor.take()
    end(log)
    events += cursor.take()
    assert join(events) == (log.choices[0].token_ids, "".join(log.choices[0].pieces))
    assert [type(event) for event in events[-2:]] == [Finish, Completed]
    assert cursor.done
    assert cursor.take() == []


@given(rows, st.data())
def test_offsets_of_each_delta_continue_the_one_before(answer: list[Row], data: st.DataObject) -> None:
    log = AnswerLog(1)
    write(log, 0, answer)
    token_offset = data.draw(st.integers(0, len(log.choices[0].token_ids)))
    text_offset = data.draw(st.integers(0, log.choices[0].text_length))
    cursor = AnswerCursor(log, offsets={0: (token_offset, text_offset)})
    for event in cursor.take():
        assert isinstance(event, Delta)
        assert event.next_token_offset == token_offset + len(event.token_ids)
        assert event.next_text_offset == text_offset + len(event.text)


@given(rows, st.data())
def test_a_resumed_reader_gets_exactly_the_rest(answer: list[Row], data: st.DataObject) -> None:
    log = AnswerLog(1)
    write(log, 0, answer)
    ids, text = log.choices[0].token_ids, "".join(log.choices[0].pieces)
    token_offset = data.draw(st.integers(0, len(ids)))
    text_offset = data.draw(st.integers(0, len(text)))
    taken = AnswerCursor(log, offsets={0: (token_offset, text_offset)}).take()
    assert join(taken) == (ids[token_offset:], text[text_offset:])


@given(rows, rows, st.data())
def test_a_replay_in_other_pieces_adds_nothing_twice(first: list[Row], rest: list[Row], data: st.DataObject) -> None:
    ids = [token_id for row in first + rest for token_id in row[0]]
    text = "".join(row[1] for row in first + rest)
    log = AnswerLog(1)
    write(log, 0, first)
    token_at, text_at = 0, 0
    while token_at < len(ids) or text_at < len(text):
        token_to = data.draw(st.integers(token_at, len(ids)))
        text_to = data.draw(st.integers(text_at, len(text)))
        if (token_to, text_to) == (token_at, text_at):
            token_to, text_to = len(ids), len(text)
        log.choices[0].append(token_at, ids[token_at:token_to], text_at, text[text_at:text_to])
        token_at, text_at = token_to, text_to
    assert (log.choices[0].token_ids, "".join(log.choices[0].pieces)) == (ids, text)


def test_a_replay_that_differs_is_an_integrity_error() -> None:
    log = AnswerLog(1)
    log.choices[0].append(0, [1, 2], 0, "ab")
    with pytest.raises(IntegrityError, match="other ids"):
        log.choices[0].append(0, [1, 3], 0, "ab")
    with pytest.raises(IntegrityError, match="other text"):
        log.choices[0].append(0, [1, 2], 0, "aX")
    assert log.choices[0].append(1, [2, 4], 1, "bc")
    assert log.choices[0].token_ids == [1, 2, 4]


@pytest.mark.parametrize(("token_offset", "text_offset"), [(1, 0), (0, 1)])
def test_a_hole_is_an_integrity_error(token_offset: int, text_offset: int) -> None:
    with pytest.raises(IntegrityError, match="hole"):
        AnswerLog(1).choices[0].append(token_offset, [7], text_offset, "x")


def test_output_after_the_end_is_an_integrity_error_but_a_replay_is_not() -> None:
    log = AnswerLog(1)
    write(log, 0, [([1], "a")])
    end(log)
    assert not log.choices[0].append(0, [1], 0, "a")
    with pytest.raises(IntegrityError, match="after"):
        log.choices[0].append(1, [2], 1, "b")


def test_the_same_finish_twice_is_one_and_another_is_an_integrity_error() -> None:
    log = AnswerLog(1)
    assert log.finish(Finish(0, FinishReason.STOP, 0))
    assert not log.finish(Finish(0, FinishReason.STOP, 0))
    with pytest.raises(IntegrityError):
        log.finish(Finish(0, FinishReason.LENGTH, 0))


def test_a_whole_delivery_is_one_delta_per_choice_at_its_end() -> None:
    log = AnswerLog(2)
    cursor = AnswerCursor(log, whole=True)
    write(log, 0, [([1], "a"), ([2], "b")])
    write(log, 1, [([3], "c")])
    assert cursor.take() == []
    log.finish(Finish(0, FinishReason.STOP, 2))
    assert cursor.take() == [Delta(0, "ab", [1, 2], 2, 2, []), Finish(0, FinishReason.STOP, 2)]
    log.finish(Finish(1, FinishReason.LENGTH, 1))
    log.complete(Usage(1, 0, 3))
    assert [type(event) for event in cursor.take()] == [Delta, Finish, Completed]


def test_choices_never_mix() -> None:
    log = AnswerLog(3)
    for choice in range(3):
        write(log, choice, [([choice], str(choice)), ([choice], str(choice))])
    events = AnswerCursor(log).take()
    assert [join(events, choice)[1] for choice in range(3)] == ["00", "11", "22"]


def test_a_reader_beyond_the_log_is_refused() -> None:
    with pytest.raises(ValueError, match="beyond"):
        AnswerCursor(AnswerLog(1), offsets={0: (1, 0)})


@given(rows, st.data())
def test_a_log_that_begins_in_the_middle_holds_exactly_the_rest_whatever_overlaps(
    answer: list[Row], data: st.DataObject
) -> None:
    ids = [token_id for row in answer for token_id in row[0]]
    text = "".join(row[1] for row in answer)
    base = data.draw(st.integers(0, len(ids))), data.draw(st.integers(0, len(text)))
    log = AnswerLog(1, {0: base})
    cursor = AnswerCursor(log)
    events: list[Delta | Finish | Completed] = []
    token_at, text_at = base
    while token_at < len(ids) or text_at < len(text):
        token_from, text_from = data.draw(st.integers(base[0], token_at)), data.draw(st.integers(base[1], text_at))
        before = token_at, text_at
        token_at, text_at = data.draw(st.integers(token_at, len(ids))), data.draw(st.integers(text_at, len(text)))
        if (token_at, text_at) == before:
            token_at, text_at = len(ids), len(text)
        log.choices[0].append(token_from, ids[token_from:token_at], text_from, text[text_from:text_at])
        events += cursor.take()
    assert join(events) == (ids[base[0] :], text[base[1] :])
    assert cursor.offsets() == [(len(ids), len(text))]
    assert (log.choices[0].token_length, log.choices[0].text_length) == (len(ids), len(text))
    again = data.draw(st.integers(base[0], len(ids))), data.draw(st.integers(base[1], len(text)))
    assert join(AnswerCursor(log, offsets={0: again}).take()) == (ids[again[0] :], text[again[1] :])


@pytest.mark.parametrize(("token_offset", "text_offset"), [(4, 9), (5, 8)])
def test_a_log_that_begins_in_the_middle_takes_and_gives_nothing_before_it(token_offset: int, text_offset: int) -> None:
    log = AnswerLog(1, {0: (5, 9)})
    with pytest.raises(IntegrityError, match="before"):
        log.choices[0].append(token_offset, [7], text_offset, "x")
    with pytest.raises(ValueError, match="before"):
        AnswerCursor(log, offsets={0: (token_offset, text_offset)})


def test_a_log_that_begins_in_the_middle_still_compares_what_comes_twice() -> None:
    log = AnswerLog(1, {0: (5, 9)})
    log.choices[0].append(5, [1, 2], 9, "ab")
    assert not log.choices[0].append(5, [1], 9, "a")
    with pytest.raises(IntegrityError, match="other ids"):
        log.choices[0].append(6, [3], 10, "b")
    with pytest.raises(IntegrityError, match="hole"):
        log.choices[0].append(8, [3], 11, "c")
