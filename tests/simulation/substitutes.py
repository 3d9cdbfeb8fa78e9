"""What stands in for the world around our processes: time, chance, sockets, threads, and the metrics' own bookkeeping.

Everything else is the real thing, from `run_async` down: apps, shells, servicers, cores, the shipped fake engine. The
substitutes are put in place once per process of ours and then serve whichever simulated process is running.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from typing import Any, TypeVar
from unittest.mock import patch

import grpc.aio
from grpc_reflection.v1alpha import reflection

import gateway.app
import services.detokenizer.app
import services.runtime.app
import services.runtime.metrics
import services.runtime.process
import services.runtime.server
import services.runtime.token_histogram
import services.scheduler.app
import services.tokenizer.app
from services.protocol.model_card import load_model_card
from services.runtime import metrics_server
from services.scheduler import engines
from services.scheduler.engine_thread import Call
from services.text.vocabulary import load_vocabulary
from services.tokenizer.encoder import Encoder
from tests.simulation.channel import SimChannel
from tests.simulation.loop import ProcessLoop
from tests.simulation.probes import probes
from tests.simulation.process import Process
from tests.simulation.server import SimServer

T = TypeVar("T")


class VirtualClock:
    """`SystemClock`, of the process that asks."""

    def now(self) -> float:
        return _here().time()

    def unix_ms(self) -> int:
        return int(_here().world.now * 1000)


class EngineOnTime:
    """`EngineThread`: one call after the other, each told of when a step would have taken its time."""

    def __init__(self) -> None:
        self._last: asyncio.Task[None] | None = None

    def start(self, work: Callable[..., T], *args: Any) -> Call[T]:
        loop = asyncio.get_running_loop()
        call = Call(partial(work, *args), loop.create_future())
        self._last = loop.create_task(self._take(call, self._last))
        return call

    async def run(self, work: Callable[..., T], *args: Any) -> T:
        return work(*args)  # loading, which takes no time here

    async def close(self) -> None:
        if self._last is not None:
            await self._last

    async def _take(self, call: Call[Any], before: asyncio.Task[None] | None) -> None:
        if before is not None:
            await before
        if call.begin():
            result = call.work()
            await asyncio.sleep(Process.running().step_s())
            if not call.outcome.cancelled():
                call.outcome.set_result(result)


class NoHttp:
    """`HttpServer`: callers come over gRPC here."""

    port = 0

    def __init__(self, application: object, **_: object) -> None:
        pass

    async def start(self) -> None:
        """Listens nowhere."""

    async def stop(self) -> None:
        """Likewise."""


class NoMetric:
    """A counter, gauge or histogram that nobody will read: the real ones cost half of a run."""

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def labels(self, *_: object, **__: object) -> NoMetric:
        return self

    def inc(self, *_: object) -> None:
        pass

    dec = set = observe = set_function = inc


def _settle() -> None:
    """The heap is everybody's here, and collected between runs."""


@contextmanager
def substituted() -> Iterator[None]:
    """Meanwhile, processes that are started in a `ProcessLoop` live in its world."""
    with ExitStack() as stack:
        for target, name, value in (*_SUBSTITUTES, *probes()):
            stack.enter_context(patch.object(target, name, value))
        yield


def _here() -> ProcessLoop:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, ProcessLoop)
    return loop


def _channel(address: str, **_: object) -> SimChannel:
    process = Process.running()
    return SimChannel(process.network, process.loop, address)


def _server(**_: object) -> SimServer:
    process = Process.running()
    return SimServer(process.network, process.loop)


def _random_bits(count: int) -> int:
    return _here().world.random.getrandbits(count)


def _nothing(*_: object, **__: object) -> None:
    pass


@cache
def _encoder(*args: Any, **kwargs: Any) -> Encoder:
    return Encoder(*args, **kwargs)


_SUBSTITUTES: list[tuple[Any, str, Any]] = [
    (grpc.aio, "insecure_channel", _channel),
    (grpc.aio, "server", _server),
    (secrets, "randbits", _random_bits),
    (services.runtime.app, "SystemClock", VirtualClock),
    (services.runtime.server, "_probe", _nothing),
    (reflection, "enable_server_reflection", _nothing),
    (metrics_server, "serve", lambda *_, **__: (0, _nothing)),
    (services.runtime.metrics, "new_registry", _nothing),
    (services.runtime.process, "LAG_INTERVAL_S", 1e9),
    *((services.runtime.metrics, name, NoMetric) for name in ("Counter", "Gauge", "Histogram", "TokenHistogram")),
    (services.scheduler.app, "EngineThread", EngineOnTime),
    (services.runtime.process, "settle", _settle),
    (services.scheduler.app, "settle", _settle),
    (gateway.app, "HttpServer", NoHttp),
    # Read once for all runs: immutable, or without state between two calls.
    (services.detokenizer.app, "load_vocabulary", cache(load_vocabulary)),
    (services.detokenizer.app, "load_model_card", cache(load_model_card)),
    (services.tokenizer.app, "load_model_card", cache(load_model_card)),
    (services.tokenizer.app, "Encoder", _encoder),
    (engines, "load_model_card", cache(load_model_card)),
]
