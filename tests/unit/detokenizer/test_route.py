"""A route whose reader stops reading: news is merged, and beyond a bound the scheduler waits."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client import CollectorRegistry

from services.detokenizer.route import MAX_UNSENT_BATCHES, Route
from services.protocol.views import RouteKey
from services.runtime.errors import Unavailable
from services.runtime.metrics import DetokenizerMetrics
from tailrace.v1 import detokenizer_pb2, scheduler_pb2
from tests.unit.detokenizer.small_tokenizers import byte_ids, byte_level, vocabulary_of

START = scheduler_pb2.SequenceStart(sequence=1, attempt_id=11)


class Tokens:
    """A token stream that a test fills; `taken` counts what was read."""

    address = "scheduler:1"

    def __init__(self) -> None:
        self.queue: asyncio.Queue[scheduler_pb2.TokenBatch] = asyncio.Queue()
        self.sent = self.taken = 0

    def send(self, text: str) -> None:
        for byte in byte_ids(byte_level(), text.encode()):
            batch = scheduler_pb2.TokenBatch(sequences=[1], token_offsets=[self.sent], token_ids=[byte])
            if not self.sent:
                batch.starts.append(START)
            self.sent += 1
            self.queue.put_nowait(batch)

    async def batch(self) -> scheduler_pb2.TokenBatch:
        batch = await self.queue.get()
        self.taken += 1
        return batch


class Reader:
    """What a reader got; it takes a message only when told to."""

    def __init__(self) -> None:
        self.may_read = asyncio.Semaphore(0)
        self.batches: list[detokenizer_pb2.TextBatch] = []

    async def write(self, message: detokenizer_pb2.StreamTextResponse) -> None:
        await self.may_read.acquire()
        self.batches.append(message.batch)

    @property
    def text(self) -> str:
        return "".join(text for batch in self.batches for text in batch.texts)


async def settle() -> None:
    """Lets every task that can go on go on."""
    for _ in range(5 * MAX_UNSENT_BATCHES):
        await asyncio.sleep(0)


@pytest.fixture
def tokens() -> Tokens:
    return Tokens()


def a_route(tokens: Tokens) -> Route:
    metrics = DetokenizerMetrics(CollectorRegistry())
    key = RouteKey(tokenizer="tokenizer", tokenizer_epoch=1, generation=1)
    return Route(key, tokens, vocabulary_of(byte_level()), metrics, lambda: None)  # type: ignore[arg-type]  # what it needs


async def test_what_comes_while_the_reader_is_slow_is_one_row_of_the_next_message(tokens: Tokens) -> None:
    reader, route = Reader(), a_route(tokens)
    running = asyncio.create_task(route.run(reader.write))
    tokens.send("a")
    await settle()
    tokens.send("bcdefgh")
    await settle()
    for _ in range(2):
        reader.may_read.release()
    await settle()
    assert [list(batch.texts) for batch in reader.batches] == [["a"], ["bcdefgh"]]
    assert reader.batches[1].token_counts == [7]
    route.end(Unavailable("over"))
    with pytest.raises(Unavailable, match="over"):
        await running


async def test_a_reader_that_stands_still_stops_the_scheduler_and_loses_nothing(tokens: Tokens) -> None:
    reader, route = Reader(), a_route(tokens)
    running = asyncio.create_task(route.run(reader.write))
    text = "0123456789" * 100
    tokens.send(text)
    await settle()
    assert tokens.taken == 2 * (MAX_UNSENT_BATCHES + 1), "a message being written, and a bounded next one"
    while reader.text != text:
        reader.may_read.release()
        await settle()
    assert len(reader.batches) < 3 * len(text) / MAX_UNSENT_BATCHES
    route.end(Unavailable("over"))
    with pytest.raises(Unavailable):
        await running


async def test_a_failing_write_ends_the_route(tokens: Tokens) -> None:
    async def write(message: detokenizer_pb2.StreamTextResponse) -> None:
        raise ConnectionResetError

    tokens.send("a")
    with pytest.raises(ConnectionResetError):
        await a_route(tokens).run(write)
