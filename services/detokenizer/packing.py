"""Fits batches to the wire: rows of one sequence joined after a pause of the reader, a large batch cut in several."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import accumulate

from services.detokenizer.batch import TextBatch

ROW_BYTES = 24
ID_BYTES = 5
CHARACTER_BYTES = 4
TOKEN_INFO_BYTES = 64


def weight(batch: TextBatch) -> int:
    """About how many bytes a batch takes on the wire, and not fewer than its rows really do."""
    infos = sum(1 + len(token.top) for tokens in batch.row_tokens.values() for token in tokens)
    return (
        ROW_BYTES * len(batch.sequences)
        + ID_BYTES * len(batch.token_ids)
        + CHARACTER_BYTES * sum(map(len, batch.texts))
        + TOKEN_INFO_BYTES * infos
    )


def merged(batch: TextBatch) -> TextBatch:
    """The same news with at most one row per sequence."""
    rows_of: dict[int, list[int]] = {}
    for row, sequence in enumerate(batch.sequences):
        rows_of.setdefault(sequence, []).append(row)
    if len(rows_of) == len(batch.sequences):
        return batch
    firsts = list(accumulate(batch.token_counts, initial=0))
    joined = TextBatch()
    joined.starts, joined.prompts = batch.starts, batch.prompts
    joined.finishes, joined.engine_ends = batch.finishes, batch.engine_ends
    joined.released_attempt_ids = batch.released_attempt_ids
    for sequence, rows in rows_of.items():
        joined.add_row(
            sequence,
            batch.token_offsets[rows[0]],
            [token_id for row in rows for token_id in batch.token_ids[firsts[row] : firsts[row + 1]]],
            batch.text_offsets[rows[0]],
            "".join([batch.texts[row] for row in rows]),
            [token for row in rows for token in batch.row_tokens.get(row, ())],
        )
    return joined


def split(batch: TextBatch, max_bytes: int) -> Iterator[TextBatch]:
    """The same news in batches of about `max_bytes`: what begins in the first, what ends in the last, rows between."""
    piece, size, first = TextBatch(), 0, 0
    piece.starts, piece.prompts = batch.starts, batch.prompts
    for row, count in enumerate(batch.token_counts):
        tokens = batch.row_tokens.get(row, ())
        piece.add_row(
            batch.sequences[row],
            batch.token_offsets[row],
            batch.token_ids[first : first + count],
            batch.text_offsets[row],
            batch.texts[row],
            tokens,
        )
        first += count
        size += ROW_BYTES + ID_BYTES * count + CHARACTER_BYTES * len(batch.texts[row])
        size += TOKEN_INFO_BYTES * sum(1 + len(token.top) for token in tokens)
        if size >= max_bytes:
            yield piece
            piece, size = TextBatch(), 0
    piece.finishes, piece.engine_ends = batch.finishes, batch.engine_ends
    piece.released_attempt_ids = batch.released_attempt_ids
    if piece:
        yield piece
