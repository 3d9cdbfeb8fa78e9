"""Where a tokenizer is put together."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Sequence

import grpc.aio

from services.protocol.generation import GenerationServicer
from services.protocol.hello import hello_of
from services.protocol.inspection import add_admin_services
from services.protocol.model_card import load_model_card
from services.protocol.slow_readers import SlowReaders
from services.runtime.app import Runtime
from services.runtime.metrics import TokenizerMetrics
from services.tokenizer.chat_template import ChatTemplate
from services.tokenizer.config import Config
from services.tokenizer.core import Ledger
from services.tokenizer.encoder import Encoder
from services.tokenizer.gateway_streams import Gateways, Readiness
from services.tokenizer.gauges import LedgerGauges
from services.tokenizer.inspection import TokenizerInspection
from services.tokenizer.local import LocalRequests
from services.tokenizer.observer import Observer
from services.tokenizer.retention import Retention
from services.tokenizer.servicer import TokenizerServicer
from services.tokenizer.shell import Shell
from services.tokenizer.text_calls import TextCalls
from services.tokenizer.upstream import SchedulerLink
from tailrace.v1 import generation_pb2_grpc, tokenizer_pb2_grpc

PUBLIC_SERVICES = ("tailrace.v1.TokenizerService", "tailrace.v1.GenerationService")

CLOSE_TIMEOUT_S = 3.0
"""For readers to take their last events and for schedulers to be told; within the process's own bound."""


class TokenizerApp:
    """One tokenizer process: the head and the tail of every request."""

    def __init__(self, runtime: Runtime, config: Config) -> None:
        self._runtime = runtime
        card = load_model_card(config.model, model_id=config.model_id)
        encoder = Encoder(config.model, max_prompt_bytes=config.max_prompt_bytes)
        template = ChatTemplate(config.model)
        metrics = TokenizerMetrics(runtime.registry)
        self._hello = hello_of(runtime.epoch, card)
        self.ledger = Ledger(
            model_id=card.model_id,
            max_open=config.max_open_requests,
            engine_grace_s=config.engine_grace_s,
            retention=Retention(
                detach_ttl_s=config.detach_ttl_s,
                max_count=config.max_kept_answers,
                max_bytes=config.max_kept_bytes,
            ),
            random_bits=secrets.randbits,
        )
        self._gauges = LedgerGauges(self.ledger, metrics, runtime.clock)
        self._links: dict[str, SchedulerLink] = {}
        self._draining = False
        observer = Observer(metrics, runtime.clock, runtime.tracer)
        self._inspection = TokenizerInspection(
            runtime,
            metrics,
            hello=lambda: self._hello,
            ledger=self.ledger,
            links=self._links,
            observer=observer,
            show_content=config.show_content,
        )
        self._shell = Shell(
            card=card,
            ledger=self.ledger,
            encoder=encoder,
            template=template,
            links=self._links,
            observer=observer,
            clock=runtime.clock,
        )
        for address in config.schedulers:
            self._links[address] = SchedulerLink(
                address,
                config.detokenizers,
                name=runtime.name,
                hello=self._hello,
                card=card,
                attempts=self.ledger.attempts,
                perform=self._shell.perform,
                on_change=self._routes_changed,
                clock=runtime.clock,
                metrics=metrics,
                submit_timeout_s=config.submit_timeout_s,
            )
        self._gateways = Gateways(self._shell.end, grace_s=config.gateway_grace_s)
        text_calls = TextCalls(config.model, card, encoder, template, created_unix_ms=runtime.clock.unix_ms())
        self._requests = LocalRequests(self._shell, text_calls, tracer=runtime.tracer, clock=runtime.clock)
        self._slow_readers = SlowReaders(
            self._requests,
            clock=runtime.clock,
            timeout_s=config.slow_reader_timeout_s,
            log=runtime.log,
            on_end=metrics.slow_readers_total.inc,
        )
        metrics.unread_seconds.set_function(self._slow_readers.longest_s)
        self._routes_changed()

    def add_to(self, server: grpc.aio.Server) -> Sequence[str]:
        """TokenizerService for gateways, GenerationService for direct callers."""
        servicer = TokenizerServicer(self._shell, self._gateways, hello=self._hello, clock=self._runtime.clock)
        tokenizer_pb2_grpc.add_TokenizerServiceServicer_to_server(servicer, server)
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(GenerationServicer(self._requests), server)
        return PUBLIC_SERVICES

    def add_to_admin(self, server: grpc.aio.Server) -> Sequence[str]:
        """Inspection and drain."""
        return add_admin_services(server, self._inspection, self._runtime, self.open_requests)

    async def serve(self) -> None:
        """Keeps routes, leases and deadlines going."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._slow_readers.run(), name="slow readers")
            tasks.create_task(self._shell.run(self._on_tick), name="requests")

    def open_requests(self) -> int:
        """Entries in the ledger."""
        return len(self.ledger)

    async def drain(self) -> None:
        """Refuses new requests, which its gateways are told, and waits for the open ones."""
        self._draining = True
        self._routes_changed()
        await self._shell.drain()

    async def close(self) -> None:
        """Leaves what is left to another tokenizer, and cuts its streams; whole answers are still taken."""
        self._shell.leave()
        self._gateways.expire(math.inf)  # those that are away will not take their ends any more
        await self._shell.close(CLOSE_TIMEOUT_S)
        self._gateways.close()
        self._gauges.set()

    def _on_tick(self, now: float) -> None:
        self._gateways.expire(now)
        self._gauges.set()

    def _routes_changed(self) -> None:
        ready = any(link.live for link in self._links.values())
        why = "; ".join(f"scheduler {link.address}: {link.why_not}" for link in self._links.values() if not link.live)
        self._runtime.set_ready(ready, "" if ready else why)
        if self._draining:
            ready, why = False, "it is draining"
        self._gateways.tell(Readiness(ready, "" if ready else why))
