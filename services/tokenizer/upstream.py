"""Everything this process asks of one scheduler: Submit, Abort and Release directly, its text through a detokenizer.

The text comes over a route: one StreamText call at a time, its generation one higher with each. A call that ends,
breaks the protocol or stays silent is followed by the next one, at the next detokenizer where there are several; the
ledger drops what it has already.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import grpc.aio

from services.protocol.hello import Hello, from_wire, mismatch
from services.protocol.hop import Hop
from services.protocol.sender import SUSPECT_S, Wakeup
from services.protocol.views import HopView, RouteKey
from services.runtime.client import connect, open_stream
from services.runtime.clock import Clock
from services.runtime.errors import Unavailable, from_rpc_error
from services.runtime.log import get_logger
from services.runtime.metrics import TokenizerMetrics
from services.tokenizer.assembler import RouteCall
from services.tokenizer.attempts import Attempts
from services.tokenizer.backoff import Backoff
from services.tokenizer.effects import Effects
from services.tokenizer.entry import Attempt
from services.tokenizer.wire import submit_to_wire, text_batch_from_wire
from tailrace.v1 import detokenizer_pb2, detokenizer_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc

CALL_TIMEOUT_S = 2.0
"""Of one unary call; repeated where it must arrive."""

REFUSED_S = 1.0
"""How long a scheduler may refuse connections before its requests go on without it."""

SILENT_S = 3.0
"""How long a scheduler may leave everything unanswered before its requests go on at another one."""

DETAILS_KEY = "grpc-status-details-bin"

# The peer did not answer; whether it acted is not known.
_UNANSWERED = frozenset({grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED})

Perform = Callable[[Effects], None]
TextCall = grpc.aio.UnaryStreamCall[detokenizer_pb2.StreamTextRequest, detokenizer_pb2.StreamTextResponse]

_log = get_logger("tokenizer")


class _CallBroken(Exception):
    """The route's call can't go on; the message says why."""


class SchedulerLink:
    """One scheduler, as this process reaches it. `on_change` is called when `live` or `why_not` changed."""

    def __init__(
        self,
        address: str,
        detokenizers: Sequence[str],
        *,
        name: str,
        hello: Hello,
        attempts: Attempts,
        perform: Perform,
        on_change: Callable[[], None],
        clock: Clock,
        metrics: TokenizerMetrics,
        submit_timeout_s: float,
    ) -> None:
        self.address = address
        self.live = False
        self.why_not = "its route is not open yet"
        self.context_length = 0
        self._detokenizers = detokenizers
        self._name = name
        self._hello = hello
        self._attempts = attempts
        self._perform = perform
        self._on_change = on_change
        self._clock = clock
        self._metrics = metrics
        self._submit_timeout_s = submit_timeout_s
        self._channel = connect(address)
        self._scheduler = scheduler_pb2_grpc.SchedulerServiceStub(self._channel)
        self._text_channels = [connect(detokenizer) for detokenizer in detokenizers]
        self._generation = 0
        self._text_hop, self._load_hop = Hop(clock, self.why_not), Hop(clock)
        self._peer: Hello | None = None
        self._broken: str | None = None
        self._unreachable_since: float | None = None
        self._aborts: dict[int, None] = {}
        self._releases: dict[int, None] = {}
        self._outbox_wakeup = Wakeup()
        self._route_opened = Wakeup()

    async def run(self) -> None:
        """Keeps the route and the lease, and sends what is in the outbox, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._keep_route(), name=f"route {self.address}")
            tasks.create_task(self._send_outbox(), name=f"outbox {self.address}")
            tasks.create_task(self._keep_reconciled(), name=f"reconciliation {self.address}")
            tasks.create_task(self._keep_lease(), name=f"lease {self.address}")

    async def close(self, timeout_s: float) -> None:
        """Sends what is left in the outbox within the bound, and closes the channels."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._flush()
        except TimeoutError:
            _log.warning("left without releasing", scheduler=self.address, attempts=len(self._releases))
        for channel in (self._channel, *self._text_channels):
            await channel.close()

    def hops(self) -> tuple[HopView, HopView]:
        """Its two long-lived streams, for operators: the route's text, and the scheduler's load."""
        route = RouteKey(tokenizer=self._name, tokenizer_epoch=self._hello.epoch, generation=self._generation)
        detokenizer = self._detokenizers[(self._generation - 1) % len(self._detokenizers)]
        return (
            self._text_hop.view("text", detokenizer, scheduler=self.address, hello=self._peer, route=route),
            self._load_hop.view("load", self.address),
        )

    # -- unary calls

    async def submit(self, attempt: Attempt) -> None:
        """Submits an attempt, repeatedly within the bound, for Submit is idempotent; the ledger is told the end."""
        give_up_at = self._clock.now() + self._submit_timeout_s
        backoff = Backoff(0.05, 1.0)
        while True:
            try:
                response = await self._scheduler.Submit(self._submission(attempt), timeout=CALL_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                now = self._clock.now()
                if not _unanswered(error):
                    self._perform(self._attempts.submit_refused(attempt.attempt_id, from_rpc_error(error), now))
                    return
                if now >= give_up_at or self._attempts.get(attempt.attempt_id) is None:
                    unavailable = Unavailable(f"scheduler {self.address} does not answer")
                    self._perform(self._attempts.submit_failed(attempt.attempt_id, unavailable, now))
                    return
                await asyncio.sleep(min(backoff.next(), give_up_at - now))
            else:
                self._perform(self._attempts.submit_answered(attempt.attempt_id, response.epoch, self._clock.now()))
                return

    def abort(self, attempt_id: int) -> None:
        """Has the scheduler stop an attempt, soon and certainly."""
        self._aborts[attempt_id] = None
        self._outbox_wakeup.set()

    def release(self, attempt_id: int) -> None:
        """Has the scheduler forget an attempt, soon and certainly."""
        self._releases[attempt_id] = None
        self._outbox_wakeup.set()

    def released(self, attempt_id: int) -> None:
        """Nothing has to be said about an attempt any more."""
        self._aborts.pop(attempt_id, None)
        self._releases.pop(attempt_id, None)

    def resubscribe(self, why: str) -> None:
        """Has the current call end and the next one begin."""
        self._broken = why

    def _submission(self, attempt: Attempt) -> scheduler_pb2.SubmitRequest:
        deadline = attempt.entry.deadline
        left_ms = 0 if deadline is None else max(1, round((deadline - self._clock.now()) * 1000))
        return submit_to_wire(attempt, tokenizer=self._name, tokenizer_epoch=self._hello.epoch, deadline_in_ms=left_ms)

    async def _send_outbox(self) -> None:
        while True:
            await self._outbox_wakeup.wait()
            await self._flush()

    async def _flush(self) -> None:
        """Sends all that waits, everything of a kind in one call, until it is answered."""
        backoff = Backoff(0.05, 1.0)
        while self._aborts or self._releases:
            try:
                await self._flush_once()
            except grpc.aio.AioRpcError as error:
                if error.code() not in _UNANSWERED:
                    _log.error("scheduler refused", scheduler=self.address, why=error.details())
                await asyncio.sleep(backoff.next())

    async def _flush_once(self) -> None:
        aborts, releases = list(self._aborts), list(self._releases)
        if aborts:
            await self._scheduler.Abort(
                scheduler_pb2.SchedulerServiceAbortRequest(
                    attempt_ids=aborts, tokenizer=self._name, tokenizer_epoch=self._hello.epoch
                ),
                timeout=CALL_TIMEOUT_S,
            )
            for attempt_id in aborts:
                self._aborts.pop(attempt_id, None)
        if releases:
            epoch = await self._release(releases)
            for attempt_id in releases:
                self._releases.pop(attempt_id, None)
            self._perform(self._attempts.release_answered(releases, epoch, self._clock.now()))

    async def _release(self, attempt_ids: Sequence[int]) -> int:
        request = scheduler_pb2.SchedulerServiceReleaseRequest(
            attempt_ids=attempt_ids, tokenizer=self._name, tokenizer_epoch=self._hello.epoch
        )
        response = await self._scheduler.Release(request, timeout=CALL_TIMEOUT_S)
        return response.epoch

    # -- the lease

    async def _keep_lease(self) -> None:
        """One StreamLoad call after the other: while there is one, the scheduler knows that we live."""
        backoff = Backoff(0.05, 1.0)
        while True:
            try:
                await self._hold_lease(backoff)
                self._load_hop.lost("it ended the stream")
            except TimeoutError:
                self._load_hop.lost(f"silent for {SUSPECT_S:g} s")
            except grpc.aio.AioRpcError as error:
                self._load_hop.lost(from_rpc_error(error).message)
            await asyncio.sleep(backoff.next())

    async def _hold_lease(self, backoff: Backoff) -> None:
        request = scheduler_pb2.StreamLoadRequest(tokenizer=self._name, tokenizer_epoch=self._hello.epoch)
        loop = asyncio.get_running_loop()
        self._load_hop.called()
        async with open_stream(lambda: self._scheduler.StreamLoad(request)) as call:
            async with asyncio.timeout(SUSPECT_S) as silence:
                async for response in call:
                    silence.reschedule(loop.time() + SUSPECT_S)
                    self._load_hop.opened()
                    self._load_hop.heard()
                    backoff.reset()
                    if response.HasField("load"):
                        load = response.load
                        self._attempts.loaded(self.address, load.waiting_sequences + load.running_sequences)

    async def _keep_reconciled(self) -> None:
        while True:
            await self._route_opened.wait()
            await self._reconcile()

    async def _reconcile(self) -> None:
        """With a route newly open, both sides agree on which attempts there are; tried while the route stands."""
        backoff = Backoff(0.05, 1.0)
        while self.live:
            wanted = self._attempts.wanted(self.address)
            request = scheduler_pb2.ReconcileRequest(
                tokenizer=self._name,
                tokenizer_epoch=self._hello.epoch,
                highest_attempt_number=wanted.highest_number,
                live_attempt_ids=wanted.live_ids,
            )
            try:
                response = await self._scheduler.Reconcile(request, timeout=CALL_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                if error.code() not in _UNANSWERED:
                    _log.error("scheduler refused to reconcile", scheduler=self.address, why=error.details())
                    return
                await asyncio.sleep(backoff.next())
            else:
                missing, now = response.missing_attempt_ids, self._clock.now()
                self._perform(self._attempts.reconciled(self.address, response.epoch, missing, now))
                return

    # -- the route

    async def _keep_route(self) -> None:
        backoff = Backoff(0.05, 1.0)
        while True:
            at = self._generation % len(self._detokenizers)
            why = await self._follow(detokenizer_pb2_grpc.DetokenizerServiceStub(self._text_channels[at]))
            if self.live:
                backoff.reset()
            self._set_live(False, f"{self._detokenizers[at]}: {why}")
            self._perform(self._attempts.route_lost(self.address, self._clock.now()))
            await self._look_for_scheduler()
            await asyncio.sleep(backoff.next())

    async def _follow(self, stub: detokenizer_pb2_grpc.DetokenizerServiceAsyncStub) -> str:
        """One call from its opening to its end; returns why it ended."""
        self._generation += 1
        self._text_hop.called()
        self._broken = None
        try:
            async with open_stream(lambda: stub.StreamText(self._route())) as call:
                await self._read(call)
        except TimeoutError:
            return f"silent for {SUSPECT_S:g} s"
        except grpc.aio.AioRpcError as error:
            return from_rpc_error(error).message
        except _CallBroken as broken:
            return str(broken)
        return "it ended the stream"

    async def _read(self, call: TextCall) -> None:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(SUSPECT_S) as silence:
            route: RouteCall | None = None
            async for response in call:
                silence.reschedule(loop.time() + SUSPECT_S)
                self._text_hop.heard()
                if route is not None:
                    self._take(route, response.batch)
                else:
                    route = self._opened(response)

    def _take(self, route: RouteCall, pb: detokenizer_pb2.TextBatch) -> None:
        repeated = route.repeated_tokens
        self._perform(route.apply(text_batch_from_wire(pb), self._clock.now()))
        self._metrics.output_tokens_total.inc(len(pb.token_ids))
        if route.repeated_tokens != repeated:
            self._metrics.duplicates_dropped_total.inc(route.repeated_tokens - repeated)
        if self._broken is not None:
            raise _CallBroken(self._broken)

    def _opened(self, response: detokenizer_pb2.StreamTextResponse) -> RouteCall:
        """The first message, which must be a hello of two processes that fit. Raises _CallBroken."""
        if response.WhichOneof("payload") != "hello":
            raise _CallBroken("its first message is not a hello")
        scheduler = from_wire(response.hello.scheduler)
        for who, theirs in (("detokenizer", from_wire(response.hello.detokenizer)), ("scheduler", scheduler)):
            why = mismatch(self._hello, theirs)
            if why is not None:
                raise _CallBroken(f"{who} does not fit: {why}")
        self.context_length, self._peer = scheduler.context_length, scheduler
        self._unreachable_since = None
        self._metrics.route_opens_total.inc()
        self._perform(self._attempts.route_opened(self.address, scheduler.epoch, self._clock.now()))
        self._set_live(True, "")
        self._route_opened.set()
        return RouteCall(self._attempts, self.address, scheduler.epoch)

    def _route(self) -> detokenizer_pb2.StreamTextRequest:
        key = scheduler_pb2.RouteKey(
            tokenizer=self._name, tokenizer_epoch=self._hello.epoch, generation=self._generation
        )
        return detokenizer_pb2.StreamTextRequest(route=key, scheduler=self.address)

    async def _look_for_scheduler(self) -> None:
        """With the route down, asks the scheduler itself who it is: a new incarnation has nothing of the old one's.

        One that refuses connections for a while is given up. One that merely does not answer may have been stopped,
        with all that it knows; it is waited for unless there is another.
        """
        try:
            epoch = await self._release(())
        except grpc.aio.AioRpcError as error:
            self._unreachable(error.code())
            return
        self._unreachable_since = None
        self._perform(self._attempts.scheduler_seen(self.address, epoch, self._clock.now()))

    def _unreachable(self, code: grpc.StatusCode) -> None:
        now = self._clock.now()
        self._unreachable_since = since = self._unreachable_since or now
        if code is grpc.StatusCode.UNAVAILABLE and now >= since + REFUSED_S:
            self._perform(self._attempts.scheduler_lost(self.address, now))
        elif code is grpc.StatusCode.DEADLINE_EXCEEDED and now >= since + SILENT_S:
            self._perform(self._attempts.scheduler_silent(self.address, now))

    def _set_live(self, live: bool, why_not: str) -> None:
        if (live, why_not) == (self.live, self.why_not):
            return
        self._metrics.routes_ready.inc(int(live) - int(self.live))
        self.live, self.why_not = live, why_not
        if live:
            self._text_hop.opened()
        else:
            self._text_hop.lost(why_not)
        self._on_change()


def _unanswered(error: grpc.aio.AioRpcError) -> bool:
    """Whether the call may not have reached the peer's code. A status with our details was raised by it."""
    answered = any(key == DETAILS_KEY for key, _ in error.trailing_metadata() or ())
    return error.code() in _UNANSWERED and not answered
