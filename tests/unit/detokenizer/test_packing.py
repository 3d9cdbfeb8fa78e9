"""However a batch is packed, its reader has the same."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from services.detokenizer.batch import SequencePrompt, SequenceStart, TextBatch, TextFinish
from services.detokenizer.packing import merged, split
from services.detokenizer.plan import TextPlan
from services.protocol.events import FinishReason, TokenInfo
from tests.unit.detokenizer.route import Received
from tests.unit.detokenizer.texts import examples

ROWS = st.lists(
    st.tuples(st.integers(1, 3), st.lists(st.integers(0, 99), max_size=4), st.text(max_size=9)), max_size=12
)


def batch_of(rows: list[tuple[int, list[int], str]]) -> TextBatch:
    batch, tokens, length = TextBatch(), dict.fromkeys(range(4), 0), dict.fromkeys(range(4), 0)
    batch.starts = [SequenceStart(sequence=1, attempt_id=1, choice=0, plan=TextPlan())]
    batch.prompts = [SequencePrompt(1, cached_prompt_tokens=16, tokens=(TokenInfo(7, b"x"),))]
    for number, ids, text in rows:
        if ids or text:
            infos = [TokenInfo(token_id, b"") for token_id in ids if number == 3]
            batch.add_row(number, tokens[number], ids, length[number], text, infos)
            tokens[number] += len(ids)
            length[number] += len(text)
    batch.finishes = [TextFinish(sequence=1, token_offset=tokens[1], text_offset=length[1], reason=FinishReason.LENGTH)]
    batch.released_attempt_ids = [1]
    return batch


def received(number: int, *batches: TextBatch) -> tuple[list[int], str, list[TokenInfo], TextFinish | None]:
    reader = Received()
    for batch in batches:
        reader.take(number, batch)
    return reader.ids, reader.text, reader.tokens, reader.finish


@settings(max_examples=examples(40))
@given(ROWS)
def test_merged_rows_join_to_the_same_with_one_row_each(rows: list[tuple[int, list[int], str]]) -> None:
    batch = batch_of(rows)
    joined = merged(batch)
    assert len(set(joined.sequences)) == len(joined.sequences)
    for number in (1, 2, 3):
        assert received(number, joined) == received(number, batch)
    assert (joined.starts, joined.released_attempt_ids) == (batch.starts, batch.released_attempt_ids)
    assert joined.prompts == batch.prompts


@settings(max_examples=examples(40))
@given(ROWS, st.integers(1, 200))
def test_a_batch_that_is_split_joins_to_the_same(rows: list[tuple[int, list[int], str]], max_bytes: int) -> None:
    batch = batch_of(rows)
    pieces = list(split(batch, max_bytes))
    for number in (1, 2, 3):
        assert received(number, *pieces) == received(number, batch)
    assert (pieces[0].starts, pieces[0].prompts) == (batch.starts, batch.prompts)
    assert pieces[-1].released_attempt_ids == [1]
    assert all(len(piece.sequences) <= 1 + max_bytes // 24 for piece in pieces)
