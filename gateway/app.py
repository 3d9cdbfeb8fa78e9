"""The gateway's one place where its parts meet."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress

import grpc.aio

from gateway.attaching import Attaching
from gateway.auth import BadKeysFile, Tenants
from gateway.config import Config
from gateway.inspection import GatewayInspection
from gateway.limits import Limits
from gateway.openai.api import Api
from gateway.openai.server import HttpServer
from gateway.places import Places
from gateway.requests import OpenAnswers, RemoteRequests
from gateway.router import Router
from gateway.servicer import SERVICE_NAME, generation_servicer
from gateway.strays import Strays
from gateway.upstream import TokenizerLink
from gateway.waker import Waker
from services.protocol.events import FinishReason
from services.protocol.hello import Hello, hello_of
from services.protocol.inspection import add_admin_services
from services.protocol.slow_readers import SlowReaders
from services.runtime.config import ConfigError
from services.runtime.metrics import GatewayMetrics
from services.runtime.process import Runtime
from tailrace.v1 import generation_pb2_grpc

FAREWELL_S = 2.0
"""How long callers may take to be written their last event when a drain's time is over."""


class Gateway:
    """The front door: GenerationService and the OpenAI-compatible API over the tokenizers of a deployment."""

    def __init__(self, runtime: Runtime, config: Config) -> None:
        self._runtime = runtime
        try:
            self._tenants = Tenants(config.api_keys_file, runtime.clock)
        except BadKeysFile as error:
            raise ConfigError(f"api_keys_file: {error}") from error
        self._limits = Limits(open_max=config.open_requests_max, tenant_max=self._tenants.open_max_of)
        self._answers = OpenAnswers()
        self._metrics = GatewayMetrics(runtime.registry)
        self.router = Router(self._hello())
        self._places = Places(grace_s=config.tokenizer_grace_s)
        self._attaching = Attaching(
            epoch=runtime.epoch, router=self.router, places=self._places, next_number=self._answers.next_number
        )
        self._connect(config)
        self._slow_readers = SlowReaders(
            self._answers,
            clock=runtime.clock,
            timeout_s=config.slow_reader_timeout_s,
            log=runtime.log,
            on_end=self._metrics.slow_readers_total.inc,
        )
        api = Api(self._requests("http"), tenants=self._tenants, config=config, not_ready=self._not_ready)
        self._http = HttpServer(
            api.application(),
            host=config.host,
            port=config.http_port,
            connections_max=config.connections_max,
            headers_timeout_s=config.headers_timeout_s,
        )
        self.http_started = asyncio.Event()

    @property
    def http_port(self) -> int:
        """The HTTP port; the one that was picked once `http_started` is set."""
        return self._http.port

    def add_to(self, server: grpc.aio.Server) -> Sequence[str]:
        """GenerationService."""
        servicer = generation_servicer(self._requests("grpc"), self._tenants)
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(servicer, server)
        return [SERVICE_NAME]

    def add_to_admin(self, server: grpc.aio.Server) -> Sequence[str]:
        """Inspection and drain."""
        self._inspection = GatewayInspection(
            self._runtime,
            self._metrics,
            answers=self._answers,
            places=self._places,
            router=self.router,
            slow_readers=self._slow_readers,
        )
        return add_admin_services(server, self._inspection, self._runtime, self.open_requests)

    async def serve(self) -> None:
        """Serves HTTP, follows the tokenizers, watches the readers."""
        await self._http.start()
        self._runtime.log.info("http started", host=self._runtime.config.host, http_port=self.http_port)
        self.http_started.set()
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._strays.run(), name="strays")
            for link in self.router.links:
                tasks.create_task(link.run(), name=f"link to {link.address}")
            tasks.create_task(self._slow_readers.run(), name="slow readers")

    def open_requests(self) -> int:
        """Requests whose callers have not had their end."""
        return self._limits.open

    async def drain(self) -> None:
        """Refuses new requests and waits for the open ones."""
        self._limits.refuse_new()
        await self._limits.wait_idle()

    async def close(self) -> None:
        """Ends what is left as aborted, so that every caller has an end, and closes the connections."""
        self._limits.refuse_new()
        for answer in self._answers:
            answer.stream.end_here(FinishReason.ABORTED)
            answer.stream.wake()
        with suppress(TimeoutError):
            async with asyncio.timeout(FAREWELL_S):
                await self._limits.wait_idle()
        await self._http.stop()
        for link in self.router.links:
            await link.close()

    def _connect(self, config: Config) -> None:
        waker = Waker(asyncio.get_running_loop())
        self._strays = Strays(
            self._attaching, self.router, waker=waker, grace_s=config.tokenizer_grace_s, metrics=self._metrics
        )
        self.router.links = tuple(
            TokenizerLink(
                address,
                epoch=self._runtime.epoch,
                clock=self._runtime.clock,
                waker=waker,
                metrics=self._metrics,
                misfit=self.router.misfit,
                on_change=self._tell_readiness,
                on_cut=self._strays.take,
            )
            for address in config.tokenizers
        )

    def _requests(self, transport: str) -> RemoteRequests:
        return RemoteRequests(
            transport=transport,
            epoch=self._runtime.epoch,
            router=self.router,
            places=self._places,
            attaching=self._attaching,
            strays=self._strays,
            limits=self._limits,
            answers=self._answers,
            metrics=self._metrics,
            tracer=self._runtime.tracer,
            clock=self._runtime.clock,
        )

    def _tell_readiness(self) -> None:
        self.router.changed()
        self._runtime.set_ready(self.router.ready, self.router.why_not)

    def _not_ready(self) -> str:
        return "" if self._runtime.ready else self.router.why_not or f"the gateway is {self._runtime.phase.value}"

    def _hello(self) -> Hello:
        return hello_of(self._runtime.epoch)
