"""The seam between a process and the service it runs: what the service offers (App) and what it is given (Runtime)."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import grpc
from prometheus_client import CollectorRegistry

from services.runtime import log, metrics
from services.runtime.clock import Clock, SystemClock
from services.runtime.config import ProcessConfig
from services.runtime.health import Health
from services.runtime.metrics import RuntimeMetrics
from services.runtime.phase import Phase, PhaseEvent, next_phase
from services.runtime.trace import NO_TRACER, Tracer


class App(Protocol):
    """What a service is to its process; the methods are called in the order in which they stand here."""

    def add_to(self, server: grpc.aio.Server) -> Sequence[str]:
        """Adds the public servicers; returns their full service names, for health and reflection."""
        ...

    def add_to_admin(self, server: grpc.aio.Server) -> Sequence[str]:
        """The same for the operators' port."""
        ...

    async def serve(self) -> None:
        """Owns every background task and runs until it is cancelled; loads what takes long, then says `set_ready`.

        An exception, or a return before draining, ends the process with exit 1.
        """
        ...

    def open_requests(self) -> int:
        """How many are open; 0 when draining has nothing to wait for."""
        ...

    async def drain(self) -> None:
        """Called once: refuses new requests and returns when none is open. Cancelled at the bound."""
        ...

    async def close(self) -> None:
        """Called once, after `serve` was cancelled: ends what is left with an event and releases resources."""
        ...


@dataclass(frozen=True, slots=True)
class Ports:
    """The ports that a process got, also where 0 was asked for."""

    public: int
    admin: int
    metrics: int


class Runtime:
    """What a process gives to its App: who it is, the time, logs, metrics, and a say in its own readiness and end.

    `name` is unique in the deployment, `service` is what it does; `epoch` is this incarnation: 64 random bits, not 0.
    """

    def __init__(
        self,
        service: str,
        config: ProcessConfig,
        *,
        clock: Clock | None = None,
        registry: CollectorRegistry | None = None,
    ) -> None:
        self.name = config.name or service
        self.service = service
        self.config = config
        self.clock = clock or SystemClock()
        self.started_at = self.clock.now()
        self.epoch = secrets.randbits(64) or 1
        self.log = log.get_logger(self.name)
        self.registry = registry or metrics.new_registry()
        self.metrics = RuntimeMetrics(self.registry, service=service)
        self.tracer: Tracer = NO_TRACER
        self.phase = Phase.STARTING
        self.drain_timeout_s = config.drain_timeout_s
        self._ready, self._why = False, "starting"
        self._health: Health | None = None
        self._drain_requested = asyncio.Event()
        self._publish()

    @property
    def ready(self) -> bool:
        """Whether new work is taken."""
        return self._ready and self.phase is Phase.SERVING

    @property
    def not_ready_why(self) -> str:
        """The reason why no new work is taken; empty while it is."""
        if self.phase in (Phase.DRAINING, Phase.STOPPED):
            return str(self.phase.value)
        return "" if self.ready else self._why

    def set_ready(self, ready: bool, why: str = "") -> None:
        """Tells whether this process can take work: health follows, and each change is logged once with its reason.

        Call it on the event loop's thread.
        """
        if (ready, why) == (self._ready, self._why):
            return
        self._ready, self._why = ready, why
        self._publish()
        if ready:
            self.log.info("ready")
        else:
            self.log.warning("not ready", why=why)

    def request_drain(self, timeout_s: float | None = None) -> None:
        """Starts the end of this process, as SIGTERM does; `timeout_s` replaces the configured bound."""
        if timeout_s is not None and not self._drain_requested.is_set():
            self.drain_timeout_s = timeout_s
        self._drain_requested.set()

    async def wait_drain_requested(self) -> None:
        """Returns once the end was asked for."""
        await self._drain_requested.wait()

    def attach(self, health: Health) -> None:
        """For the process: from now on readiness shows in this health service."""
        self._health = health
        self._publish()

    def advance(self, event: PhaseEvent) -> None:
        """For the process: moves on to the next phase."""
        self.phase = next_phase(self.phase, event)
        self._publish()

    def _publish(self) -> None:
        self.metrics.set_phase(self.phase)
        self.metrics.ready.set(self.ready)
        if self._health is not None:
            self._health.set_all(self.ready)
