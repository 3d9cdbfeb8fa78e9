"""All services of a plan, as they are configured here; what they hold when nothing should be held."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from gateway.app import Gateway
from gateway.config import Config as GatewayConfig
from services.detokenizer.app import DetokenizerApp
from services.detokenizer.config import Config as DetokenizerConfig
from services.scheduler.app import SchedulerApp
from services.scheduler.config import SchedulerConfig
from services.tokenizer.app import TokenizerApp
from services.tokenizer.config import Config as TokenizerConfig
from tests.simulation import model
from tests.simulation.network import Network
from tests.simulation.plan import Shape
from tests.simulation.process import Service
from tests.simulation.world import World

PORT = 7000
GRACES_S = 30.0
"""Longer than all graces and leases below, one after the other."""


class Deployment:
    """The services by name. The graces are short, so that a run sees their ends."""

    def __init__(self, world: World, network: Network, shape: Shape) -> None:
        self.shape = shape
        self.services: dict[str, Service] = {}
        common: dict[str, Any] = {"port": PORT, "drain_timeout_s": 3.0, "model": model.directory()}
        at = {kind: tuple(f"{name}:{PORT}" for name in shape.names(kind)) for kind in _KINDS}

        def add(kind: str, config: Callable[..., Any], make_app: Any, **options: Any) -> None:
            for name in shape.names(kind):
                made = config(name=name, host=name, admin_port=PORT + 1, **options)
                self.services[name] = Service(world, network, made, make_app)

        add("scheduler", SchedulerConfig, SchedulerApp, **common, **_engine(shape))
        add("detokenizer", DetokenizerConfig, DetokenizerApp, **common, schedulers=at["scheduler"])
        add("tokenizer", TokenizerConfig, TokenizerApp, **common, schedulers=at["scheduler"],
            detokenizers=at["detokenizer"], max_open_requests=shape.max_open, submit_timeout_s=3.0,
            gateway_grace_s=3.0, detach_ttl_s=2.5, engine_grace_s=5.0)  # fmt: skip
        del common["model"]
        add("gateway", GatewayConfig, Gateway, **common, tokenizers=at["tokenizer"], tokenizer_grace_s=3.0,
            slow_reader_timeout_s=3.0, open_requests_max=shape.max_open)  # fmt: skip
        for name in shape.names("scheduler"):
            self.services[name].step_s = lambda: shape.step_s * (0.5 + world.random.random())

    def of(self, kind: str) -> list[Service]:
        """The processes of a service."""
        return [self.services[name] for name in self.shape.names(kind)]

    def not_ready(self) -> dict[str, str]:
        """Who takes no work, and why."""
        found = {name: service.runtime for name, service in self.services.items()}
        return {name: r.not_ready_why if r else "not started" for name, r in found.items() if r is None or not r.ready}

    def left_behind(self) -> dict[str, object]:
        """What any service still holds; empty when idle."""
        held: dict[str, object] = {}
        for kind, look in _KINDS.items():
            for service in self.of(kind):
                held.update({f"{service.name}: {what}": left for what, left in look(service.app).items() if left})
        return held

    def check_integrity(self) -> None:
        """Raises AssertionError when a scheduler's accounts are wrong."""
        for service in self.of("scheduler"):
            if service.alive and service.app is not None and (serving := service.app._serving) is not None:
                serving.loop.core.check_integrity()


def _engine(shape: Shape) -> dict[str, Any]:
    return {
        "engine": "fake",
        "fake_mode": "echo" if shape.echo else "hash",
        "draft_tokens": shape.draft_tokens,
        "kv_tokens": shape.kv_blocks * 16,
        "max_running": shape.max_running,
        "max_waiting": shape.max_waiting,
        "max_step_tokens": shape.max_step_tokens,
        "max_held": 256,
        "lease_grace_s": 3.0,
        "tombstone_ttl_s": shape.tombstone_ttl_s,
    }


def _in_scheduler(app: SchedulerApp) -> dict[str, object]:
    serving = app._serving
    assert serving is not None
    core, load = serving.loop.core, serving.loop.core.load()
    return {
        "attempts": len(core.attempts),
        "sequences": core.open_sequences + core.known.held,
        "logs": serving.loop.publisher.log_sequences,
        "blocks": load.total_blocks - load.free_blocks - load.cached_blocks,
    }


def _in_detokenizer(app: DetokenizerApp) -> dict[str, object]:
    return {"sequences": sum(core.known_sequences for core in app._cores())}


def _in_tokenizer(app: TokenizerApp) -> dict[str, object]:
    links = app._links.values()
    return {
        "requests": [f"{e.request_id} {e.caller.name} {[a.phase.name for a in e.attempts]}" for e in app.ledger],
        "attempts": len(list(app.ledger.attempts)),
        "labels": len(app.ledger._book.current),
        "room for kept answers": app.ledger.retention.reserved_bytes,
        "gateway streams": sum(len(gateway.streams) for gateway in app._gateways),
        "aborts and releases to be sent": sum(len(link._outbox) for link in links),
        "waiting callers": len(app._shell._openers) + len(app._shell._waiting),
    }


def _in_gateway(app: Gateway) -> dict[str, object]:
    return {
        "permits": app.open_requests(),
        "answers": len(app._answers),
        "streams": sum(len(link.streams) for link in app.router.links),
        "places": len(app._places),
        "releases to be sent": sum(len(link.releases) for link in app.router.links),
    }


_KINDS: dict[str, Callable[[Any], dict[str, object]]] = {
    "scheduler": _in_scheduler,
    "detokenizer": _in_detokenizer,
    "tokenizer": _in_tokenizer,
    "gateway": _in_gateway,
}
