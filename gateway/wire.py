"""A tokenizer's event batches, read: the one place of the gateway where their packed columns are known."""

from __future__ import annotations

from collections.abc import Mapping

from gateway.core import CutReason, EventRows
from gateway.releases import StreamEnd
from services.protocol.wire import completed_from_wire, finish_from_wire, tokens_from_wire
from tailrace.v1 import tokenizer_pb2

_ENDS = {
    StreamEnd.DELIVERED: tokenizer_pb2.STREAM_END_DELIVERED,
    StreamEnd.CALLER_GONE: tokenizer_pb2.STREAM_END_CALLER_GONE,
}


def rows_from_wire(pb: tokenizer_pb2.EventBatch) -> EventRows:
    """An EventBatch as columns, with the values that an empty column stands for filled in."""
    stream_ids = list(pb.stream_ids)
    return EventRows(
        stream_ids=stream_ids,
        choices=list(pb.choices) or [0] * len(stream_ids),
        token_offsets=list(pb.token_offsets),
        token_counts=list(pb.token_counts) or [1] * len(stream_ids),
        token_ids=list(pb.token_ids),
        text_offsets=list(pb.text_offsets),
        texts=list(pb.texts),
        tokens={row.row: tokens_from_wire(row.tokens) for row in pb.row_tokens},
        finishes=[(item.stream_id, finish_from_wire(item.finish)) for item in pb.finishes],
        completions=[(item.stream_id, completed_from_wire(item.completed).usage) for item in pb.completions],
        cuts=[(item.stream_id, _cut_reason(item.reason)) for item in pb.cuts],
    )


def ended_to_wire(streams: Mapping[int, StreamEnd]) -> list[tokenizer_pb2.EndedStream]:
    """Streams that have ended on the caller's side."""
    return [tokenizer_pb2.EndedStream(stream_id=stream_id, end=_ENDS[end]) for stream_id, end in streams.items()]


def _cut_reason(value: int) -> CutReason:
    """A reason that a newer tokenizer may send means the same as none: ask elsewhere."""
    try:
        return CutReason(value)
    except ValueError:
        return CutReason.UNSPECIFIED
