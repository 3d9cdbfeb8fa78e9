"""What a token costs in the gateway without sockets: from a batch's bytes to the bytes that a caller gets.

    python -m bench.gateway_path

Prints CPU µs per row (a token of one stream) for each stage, at several batch sizes, best of several rounds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

from gateway.core import EventRows, Stream, StreamTable
from gateway.openai.chat import ChatForm
from gateway.openai.chunks import AnswerChunks
from gateway.openai.event_ids import ChoicePosition, EventIds, Position
from gateway.wire import rows_from_wire
from services.protocol.events import Completed, Delta, Finish
from services.protocol.wire import event_to_wire
from tailrace.v1 import tokenizer_pb2

Result = TypeVar("Result")
Taken = Sequence[Delta | Finish | Completed]

STEPS = 64
ROUNDS = 7
TEXT = " token"


def main() -> None:
    """Prints the table."""
    print(f"{'streams':>8} {'parse':>8} {'append':>8} {'take':>8} {'sse':>8} {'grpc':>8}   µs per token")
    for streams in (1, 32, 256, 1024):
        times = [measure(streams) for _ in range(ROUNDS)]
        best = [min(column) * 1e6 / (streams * STEPS) for column in zip(*times, strict=True)]
        print(f"{streams:>8} " + " ".join(f"{value:8.2f}" for value in best))


def measure(streams: int) -> tuple[float, ...]:
    """Seconds of each stage for STEPS batches of one token per stream."""
    table = StreamTable()
    opened = [Stream(request_id="", n=1, wake=lambda: None) for _ in range(streams)]
    for number, stream in enumerate(opened):
        table.add(number, stream)
    envelope = {"id": "chatcmpl-req-0123456789", "object": "chat.completion.chunk", "created": 1, "model": "m" * 24}
    form = ChatForm()
    start = Position(form="c", resume_token=bytes(16), include_usage=False, logprobs=False, choices=(ChoicePosition(),))
    chunks = [
        AnswerChunks(
            form, envelope, first_choice=0, n=1, include_usage=False, logprobs=False, ids=EventIds(start),
            position=start,
        )
        for _ in range(streams)
    ]  # fmt: skip
    spent = [0.0] * 5
    for wire in batches(streams):
        rows = timed(spent, 0, partial(parse, wire))
        timed(spent, 1, partial(table.apply, rows))
        taken = timed(spent, 2, partial(take_all, opened))
        timed(spent, 3, partial(write_sse, chunks, taken))
        timed(spent, 4, partial(write_grpc, taken))
    return tuple(spent)


def batches(streams: int) -> Sequence[bytes]:
    """STEPS messages, each with a token for every stream."""
    return [
        tokenizer_pb2.StreamEventsResponse(
            batch=tokenizer_pb2.EventBatch(
                stream_ids=range(streams),
                token_offsets=[step] * streams,
                token_ids=range(1000, 1000 + streams),
                text_offsets=[step * len(TEXT)] * streams,
                texts=[TEXT] * streams,
            )
        ).SerializeToString()
        for step in range(STEPS)
    ]


def parse(wire: bytes) -> EventRows:
    """A message of a tokenizer's event call, read."""
    return rows_from_wire(tokenizer_pb2.StreamEventsResponse.FromString(wire).batch)


def take_all(streams: Sequence[Stream]) -> list[Taken]:
    """What every caller's writer takes."""
    return [stream.take() for stream in streams]


def write_sse(chunks: Sequence[AnswerChunks], taken: Sequence[Taken]) -> None:
    """The bytes of every HTTP caller."""
    for writer, events in zip(chunks, taken, strict=True):
        writer.encode(events)


def write_grpc(taken: Sequence[Taken]) -> None:
    """The bytes of every gRPC caller."""
    for events in taken:
        for event in events:
            event_to_wire(event).SerializeToString()


def timed(spent: list[float], stage: int, work: Callable[[], Result]) -> Result:
    """Runs a stage and adds its CPU time."""
    start = time.process_time()
    result = work()
    spent[stage] += time.process_time() - start
    return result


if __name__ == "__main__":
    main()
