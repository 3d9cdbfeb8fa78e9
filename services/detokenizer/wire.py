"""Token batches read into the core, its text batches written: the only place here that knows either message."""

from __future__ import annotations

from collections.abc import Sequence

from services.detokenizer.batch import MAX_ROW_IDS, SequenceEnd, SequenceStart, TextBatch, TextFinish
from services.detokenizer.core import Core
from services.detokenizer.plan import TextPlan
from services.detokenizer.sequence import Logprobs
from services.detokenizer.state import ProtocolError
from services.protocol.hello import Hello
from services.protocol.hello import to_wire as hello_to_wire
from services.protocol.wire import (
    failure_from_wire,
    failure_to_wire,
    reason_from_wire,
    reason_to_wire,
    stop_from_wire,
    stop_to_wire,
    tokens_to_wire,
    trace_from_wire,
    trace_to_wire,
)
from tailrace.v1 import common_pb2, detokenizer_pb2, scheduler_pb2

TextMessage = detokenizer_pb2.StreamTextResponse
"""One message to the tokenizer; only this file looks inside."""


def read_batch(pb: scheduler_pb2.TokenBatch, core: Core) -> None:
    """Gives the core everything that a batch says, in the order that the contract fixes. Raises ProtocolError."""
    for start in pb.starts:
        core.start(_read_start(start))
    for prompt in pb.prompts:
        logprobs = [None, *(_read_logprobs(one) for one in prompt.logprobs)]
        core.prompt(prompt.sequence, prompt.cached_prompt_tokens, prompt.token_ids, logprobs)
    if pb.sequences:
        _read_rows(pb, core)
    for end in pb.ends:
        core.end(_read_end(end))
    for attempt_id in pb.released_attempt_ids:
        core.released(attempt_id)


def write_batch(batch: TextBatch) -> detokenizer_pb2.StreamTextResponse:
    """A batch as one message; columns that say nothing are left out."""
    several_tokens = len(batch.token_ids) != len(batch.sequences) or batch.token_counts.count(1) != len(batch.sequences)
    return detokenizer_pb2.StreamTextResponse(
        batch=detokenizer_pb2.TextBatch(
            starts=[
                detokenizer_pb2.TextStart(
                    sequence=start.sequence,
                    attempt_id=start.attempt_id,
                    choice=start.choice,
                    trace=trace_to_wire(start.trace),
                )
                for start in batch.starts
            ],
            prompts=[
                detokenizer_pb2.TextPrompt(
                    sequence=prompt.sequence,
                    cached_prompt_tokens=prompt.cached_prompt_tokens,
                    tokens=tokens_to_wire(prompt.tokens),
                )
                for prompt in batch.prompts
            ],
            sequences=batch.sequences,
            token_offsets=batch.token_offsets,
            token_counts=batch.token_counts if several_tokens else None,
            token_ids=batch.token_ids,
            text_offsets=batch.text_offsets,
            texts=batch.texts,
            row_tokens=[
                common_pb2.RowTokens(row=row, tokens=tokens_to_wire(tokens)) for row, tokens in batch.row_tokens.items()
            ],
            finishes=[_write_finish(finish) for finish in batch.finishes],
            engine_ends=[_write_end(end) for end in batch.engine_ends],
            released_attempt_ids=batch.released_attempt_ids,
        )
    )


def write_hello(ours: Hello, scheduler: Hello) -> detokenizer_pb2.StreamTextResponse:
    """A route's first message."""
    hello = detokenizer_pb2.RouteHello(detokenizer=hello_to_wire(ours), scheduler=hello_to_wire(scheduler))
    return detokenizer_pb2.StreamTextResponse(hello=hello)


def heartbeat() -> detokenizer_pb2.StreamTextResponse:
    """An empty batch."""
    return detokenizer_pb2.StreamTextResponse(batch=detokenizer_pb2.TextBatch())


def draining() -> detokenizer_pb2.StreamTextResponse:
    """Asks the tokenizer to open its route elsewhere."""
    return detokenizer_pb2.StreamTextResponse(draining=detokenizer_pb2.Draining())


def _read_rows(pb: scheduler_pb2.TokenBatch, core: Core) -> None:
    ids, rows = list(pb.token_ids), len(pb.sequences)
    if len(pb.token_offsets) != rows or (len(ids) if not pb.token_counts else len(pb.token_counts)) != rows:
        raise ProtocolError("columns of different lengths")
    if not pb.token_counts and not pb.row_logprobs:
        core.column(pb.sequences, pb.token_offsets, ids)
        return
    counts = list(pb.token_counts) or [1] * rows
    if sum(counts) != len(ids):
        raise ProtocolError(f"{len(ids)} ids in rows of {sum(counts)}")
    _read_long_rows(pb, counts, ids, core)


def _read_long_rows(pb: scheduler_pb2.TokenBatch, counts: list[int], ids: list[int], core: Core) -> None:
    logprobs = {row.row: [_read_logprobs(token) for token in row.tokens] for row in pb.row_logprobs}
    first = 0
    for row, (number, token_offset, count) in enumerate(zip(pb.sequences, pb.token_offsets, counts, strict=True)):
        _read_long_row(core, number, token_offset, ids[first : first + count], logprobs.get(row))
        first += count


def _read_long_row(
    core: Core, number: int, token_offset: int, ids: list[int], logprobs: Sequence[Logprobs] | None
) -> None:
    if logprobs is not None and len(logprobs) != len(ids):
        raise ProtocolError(f"sequence {number}: {len(logprobs)} logprobs for {len(ids)} ids")
    for start in range(0, len(ids), MAX_ROW_IDS):
        end = start + MAX_ROW_IDS
        core.tokens(number, token_offset + start, ids[start:end], logprobs[start:end] if logprobs else None)


def _read_start(pb: scheduler_pb2.SequenceStart) -> SequenceStart:
    text = pb.text
    return SequenceStart(
        sequence=pb.sequence,
        attempt_id=pb.attempt_id,
        choice=pb.choice,
        plan=TextPlan(
            stop=tuple(text.stop),
            include_stop_in_output=text.include_stop_in_output,
            min_tokens=text.min_tokens,
            skip_special_tokens=text.skip_special_tokens,
            spaces_between_special_tokens=text.spaces_between_special_tokens,
            begins_text=text.begins_text,
            token_info=text.token_info,
            end_token_ids=frozenset(text.end_token_ids),
        ),
        trace=trace_from_wire(pb.trace),
    )


def _read_logprobs(pb: scheduler_pb2.TokenLogprobs) -> Logprobs:
    if len(pb.top_ids) != len(pb.top_logprobs):
        raise ProtocolError("columns of different lengths")
    return Logprobs(pb.logprob, list(pb.top_ids), list(pb.top_logprobs))


def _read_end(pb: scheduler_pb2.SequenceEnd) -> SequenceEnd:
    return SequenceEnd(
        sequence=pb.sequence,
        token_offset=pb.token_offset,
        reason=reason_from_wire(pb.reason),
        stop=stop_from_wire(pb.stop) if pb.HasField("stop") else None,
        error=failure_from_wire(pb.error) if pb.HasField("error") else None,
        cached_prompt_tokens=pb.cached_prompt_tokens,
    )


def _write_finish(finish: TextFinish) -> detokenizer_pb2.TextFinish:
    return detokenizer_pb2.TextFinish(
        sequence=finish.sequence,
        token_offset=finish.token_offset,
        text_offset=finish.text_offset,
        reason=reason_to_wire(finish.reason),
        stop=stop_to_wire(finish.stop),
        error=failure_to_wire(finish.error),
    )


def _write_end(end: SequenceEnd) -> scheduler_pb2.SequenceEnd:
    return scheduler_pb2.SequenceEnd(
        sequence=end.sequence,
        token_offset=end.token_offset,
        reason=reason_to_wire(end.reason),
        stop=stop_to_wire(end.stop),
        error=failure_to_wire(end.error),
        cached_prompt_tokens=end.cached_prompt_tokens,
    )
