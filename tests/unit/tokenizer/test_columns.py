"""Columns say what deltas say: whatever is appended when, a stream's rows join to the log, once and in order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.protocol.answer import AnswerLog
from services.protocol.events import Finish, FinishReason, TokenInfo, Usage
from services.tokenizer.columns import MAX_ROW_TOKENS, EventColumns, StreamCursor
from services.tokenizer.wire import event_batch_to_wire
from tailrace.v1 import tokenizer_pb2

deltas = st.lists(
    st.tuples(
        st.integers(0, 2), st.lists(st.integers(0, 9), max_size=3), st.sampled_from(["", "a", "é🙂"]), st.booleans()
    )
)


@given(deltas=deltas, whole=st.booleans(), infos=st.booleans())
def test_rows_join_to_the_log_whenever_they_are_taken(
    deltas: list[tuple[int, list[int], str, bool]], whole: bool, infos: bool
) -> None:
    log, batches = AnswerLog(3), []
    cursor = StreamCursor(log, 77, whole=whole)
    for choice, ids, text, take in deltas:
        mine = log.choices[choice]
        tokens = [TokenInfo(token_id, b"x") for token_id in ids] if infos else []
        mine.append(len(mine.token_ids), ids, mine.text_length, text, tokens)
        if take:
            batches.append(taken(cursor))
    for choice, mine in enumerate(log.choices):
        log.finish(Finish(choice, FinishReason.STOP, len(mine.token_ids)))
    log.complete(Usage(1, 0, sum(len(mine.token_ids) for mine in log.choices)))
    batches += [taken(cursor), taken(cursor)]
    for choice, mine in enumerate(log.choices):
        rows = [row for batch in batches for row in rows_of(batch) if row[0] == choice]
        assert [token_id for row in rows for token_id in row[2]] == mine.token_ids
        assert "".join(row[4] for row in rows) == mine.text_from(0)
        for at, row in enumerate(rows):
            assert row[1] == sum(len(before[2]) for before in rows[:at])
            assert row[3] == sum(len(before[4]) for before in rows[:at])
            assert row[5] == (row[2] if infos else [])
        assert not whole or len(rows) <= 1
    finishes = [finish for batch in batches for finish in batch.finishes]
    assert sorted(finish.finish.choice for finish in finishes) == [0, 1, 2]
    assert [len(batch.completions) for batch in batches] == [0] * (len(batches) - 2) + [1, 0]


def test_columns_that_say_nothing_are_left_out() -> None:
    log = AnswerLog(1)
    cursor = StreamCursor(log, 77, whole=False)
    log.choices[0].append(0, [5], 0, "a")
    batch = taken(cursor)
    assert (list(batch.choices), list(batch.token_counts)) == ([], [])
    log.choices[0].append(1, [6, 7], 1, "b")
    assert list(taken(cursor).token_counts) == [2]


def test_rows_with_token_level_output_are_of_bounded_size_and_the_text_comes_last() -> None:
    log = AnswerLog(1)
    count = 2 * MAX_ROW_TOKENS + 5
    log.choices[0].append(0, [1] * count, 0, "text", [TokenInfo(1, b"x")] * count)
    batch = taken(StreamCursor(log, 77, whole=False))
    assert list(batch.token_counts) == [MAX_ROW_TOKENS, MAX_ROW_TOKENS, 5]
    assert list(batch.texts) == ["", "", "text"]
    assert [len(row.tokens) for row in batch.row_tokens] == [MAX_ROW_TOKENS, MAX_ROW_TOKENS, 5]


def taken(cursor: StreamCursor) -> tokenizer_pb2.EventBatch:
    columns = EventColumns()
    cursor.take_into(columns)
    return event_batch_to_wire(columns).batch


def rows_of(batch: tokenizer_pb2.EventBatch) -> list[tuple[int, int, list[int], int, str, list[int]]]:
    """(choice, token offset, ids, text offset, text, ids of the token-level output) per row."""
    rows, start = [], 0
    infos = {row.row: [token.token_id for token in row.tokens] for row in batch.row_tokens}
    for row in range(len(batch.stream_ids)):
        count = batch.token_counts[row] if batch.token_counts else 1
        rows.append(
            (
                batch.choices[row] if batch.choices else 0,
                batch.token_offsets[row],
                list(batch.token_ids[start : start + count]),
                batch.text_offsets[row],
                batch.texts[row],
                infos.get(row, []),
            )
        )
        start += count
    return rows
