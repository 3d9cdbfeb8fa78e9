"""What a delta costs in the tokenizer: a text batch in, an event batch out, without sockets.

    python -m bench.tokenizer_path [--streams 256] [--steps 400]

Prints CPU microseconds per row for receiving (parse the message, append to the logs, wake the readers) and for sending
(take what is new, build the message, serialise it), with one token per stream and step.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry

from services.protocol.request import IdsPrompt, Sampling, ValidRequest
from services.runtime.clock import SystemClock
from services.runtime.metrics import TokenizerMetrics
from services.tokenizer.assembler import RouteCall
from services.tokenizer.columns import EventColumns
from services.tokenizer.core import Ledger
from services.tokenizer.effects import Effects, Progressed, Submit, Wake
from services.tokenizer.entry import Pinned
from services.tokenizer.gateway_streams import Gateways, Readiness
from services.tokenizer.observer import Observer
from services.tokenizer.retention import Retention
from services.tokenizer.wire import event_batch_to_wire, text_batch_from_wire
from tailrace.v1 import detokenizer_pb2

SCHEDULER = "bench"
WARM_UP_STEPS = 20
KEEPS = Retention(detach_ttl_s=1.0, max_count=0, max_bytes=0)


class Path:
    """A ledger with open requests, read by one gateway."""

    def __init__(self, streams: int) -> None:
        self.ledger = Ledger(
            model_id="bench",
            max_open=streams,
            engine_grace_s=1.0,
            retention=KEEPS,
            random_bits=random.Random(1).getrandbits,
        )
        self.ledger.attempts.route_opened(SCHEDULER, 1, 0.0)
        self.observer = Observer(TokenizerMetrics(CollectorRegistry()), SystemClock())
        gateways = Gateways(lambda entry, delivered: None, grace_s=30.0)
        self.call = gateways.connect(1)
        assert isinstance(self.call.take(), Readiness)  # it stands before everything else
        self.route = RouteCall(self.ledger.attempts, SCHEDULER, 1)
        starts = []
        for stream in range(streams):
            request = ValidRequest(request_id=f"r{stream}", prompt=IdsPrompt((1,)), sampling=Sampling(seed=1))
            entry, effects = self.ledger.open(
                Pinned(request, [1], request), tenant="", scheduler=SCHEDULER, deadline=None, now=0.0, unix_ms=0
            )
            gateways.get(1).add(stream, entry)
            starts += [effect.attempt.attempt_id for effect in effects if isinstance(effect, Submit)]
        batch = detokenizer_pb2.TextBatch()
        for sequence, attempt_id in enumerate(starts):
            batch.starts.add(sequence=sequence, attempt_id=attempt_id)
        self.route.apply(text_batch_from_wire(batch), 0.0)

    def receive(self, message: bytes, now: float) -> None:
        """One message of a route."""
        response = detokenizer_pb2.StreamTextResponse.FromString(message)
        self._perform(self.route.apply(text_batch_from_wire(response.batch), now))

    def send(self) -> bytes:
        """One message of the gateway's stream."""
        columns = self.call.take()
        assert isinstance(columns, EventColumns)
        return event_batch_to_wire(columns).SerializeToString()

    def _perform(self, effects: Effects) -> None:
        for effect in effects:
            match effect:
                case Wake(entries):
                    for entry in entries:
                        for reader in entry.readers:
                            reader.mark()
                case Progressed():
                    self.observer.progressed(effect)
                case _:
                    pass


def messages(streams: int, steps: int) -> Iterator[bytes]:
    """What a detokenizer sends: one token and about four characters per stream and step."""
    for step in range(steps):
        batch = detokenizer_pb2.TextBatch(
            sequences=range(streams),
            token_offsets=[step] * streams,
            token_ids=[random.randrange(49152) for _ in range(streams)],
            text_offsets=[step * 4] * streams,
            texts=[" the"] * streams,
        )
        yield detokenizer_pb2.StreamTextResponse(batch=batch).SerializeToString()


async def run(streams: int, steps: int) -> tuple[float, float]:
    """CPU microseconds per row of receiving and of sending."""
    path = Path(streams)
    receiving = sending = 0.0
    for step, message in enumerate(messages(streams, WARM_UP_STEPS + steps)):
        start = time.process_time()
        path.receive(message, float(step))
        middle = time.process_time()
        path.send()
        if step >= WARM_UP_STEPS:
            receiving += middle - start
            sending += time.process_time() - middle
    rows = streams * steps
    return receiving / rows * 1e6, sending / rows * 1e6


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--steps", type=int, default=400)
    arguments = parser.parse_args()
    receiving, sending = asyncio.run(run(arguments.streams, arguments.steps))
    print(f"{arguments.streams} streams, {arguments.steps} steps: CPU per row")
    print(f"  receive  {receiving:6.2f} µs")
    print(f"  send     {sending:6.2f} µs")


if __name__ == "__main__":
    main()
