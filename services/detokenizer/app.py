"""Where a detokenizer is put together."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import suppress

import grpc.aio

from services.detokenizer.config import Config
from services.detokenizer.core import Core
from services.detokenizer.inspection import DetokenizerInspection
from services.detokenizer.servicer import DetokenizerServicer
from services.detokenizer.upstream import Schedulers
from services.protocol.hello import hello_of
from services.protocol.inspection import add_admin_services
from services.protocol.model_card import ModelCard, load_model_card
from services.runtime.app import Runtime
from services.runtime.config import ConfigError
from services.runtime.errors import PreconditionFailed, Unavailable
from services.runtime.metrics import DetokenizerMetrics
from services.runtime.phase import Phase
from services.text.vocabulary import UnsupportedTokenizer, Vocabulary, load_vocabulary
from tailrace.v1 import detokenizer_pb2_grpc

SERVICE = "tailrace.v1.DetokenizerService"


MOVE_S = 1.0
"""How long a drain waits for routes without a sequence to be opened elsewhere."""


class DetokenizerApp:
    """One detokenizer: a vocabulary, and as many routes as tokenizers ask for."""

    def __init__(self, runtime: Runtime, config: Config) -> None:
        self._runtime = runtime
        card, vocabulary = _load(config)
        self._hello = hello_of(runtime.epoch, card)
        self._schedulers = Schedulers(runtime.clock)
        self._metrics = metrics = DetokenizerMetrics(runtime.registry)
        self._servicer = DetokenizerServicer(
            hello=self._hello,
            vocabulary=vocabulary,
            addresses=config.schedulers,
            schedulers=self._schedulers,
            metrics=metrics,
            accepting=lambda: runtime.phase is not Phase.DRAINING,
            tracer=runtime.tracer,
            clock=runtime.clock,
        )
        metrics.open_routes.set_function(lambda: len(self._servicer.routes))
        metrics.open_sequences.set_function(lambda: sum(core.known_sequences for core in self._cores()))

    def add_to(self, server: grpc.aio.Server) -> Sequence[str]:
        """For tokenizers."""
        detokenizer_pb2_grpc.add_DetokenizerServiceServicer_to_server(self._servicer, server)
        return (SERVICE,)

    def add_to_admin(self, server: grpc.aio.Server) -> Sequence[str]:
        """For operators."""
        inspection = DetokenizerInspection(
            self._runtime,
            self._metrics,
            hello=self._hello,
            routes=self._servicer.routes,
            streams=self._schedulers.streams,
        )
        return add_admin_services(server, inspection, self._runtime, self.open_requests)

    async def serve(self) -> None:
        """Ready at once: whether a scheduler answers, its routes say."""
        self._runtime.set_ready(True)
        await asyncio.Event().wait()

    def open_requests(self) -> int:
        """Sequences without a finish."""
        return sum(core.open_sequences for core in self._cores())

    async def drain(self) -> None:
        """No new routes: tokenizers are asked to open theirs elsewhere; until they do, their sequences go on here."""
        for route in self._servicer.routes:
            route.drain()
        with suppress(TimeoutError):
            async with asyncio.timeout(MOVE_S):
                while self._servicer.routes:
                    await self._servicer.progress.wait()
        while self.open_requests():
            await self._servicer.progress.wait()

    async def close(self) -> None:
        """Tells the tokenizers to open their routes elsewhere."""
        for route in list(self._servicer.routes):
            route.end(Unavailable("the detokenizer is stopping"))
        await self._schedulers.close()

    def _cores(self) -> Iterator[Core]:
        return (route.core for route in self._servicer.routes)


def make_app(runtime: Runtime, config: Config) -> DetokenizerApp:
    """The app of one process. Raises ConfigError, naming what is wrong with the model."""
    try:
        return DetokenizerApp(runtime, config)
    except (PreconditionFailed, UnsupportedTokenizer) as error:
        raise ConfigError(f"model {config.model}: {error}") from error


def _load(config: Config) -> tuple[ModelCard, Vocabulary]:
    card = load_model_card(config.model, model_id=config.model_id)
    return card, load_vocabulary(config.model / "tokenizer.json", size=card.vocab_size)
