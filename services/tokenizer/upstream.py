"""Everything this process asks of one scheduler: the unary calls directly, its text through detokenizers (route.py)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import grpc.aio

from services.protocol.hello import Hello
from services.protocol.hop import Hop
from services.protocol.model_card import ModelCard
from services.protocol.sender import SUSPECT_S
from services.protocol.views import HopView
from services.runtime.client import connect, open_stream
from services.runtime.clock import Clock
from services.runtime.errors import PreconditionFailed, Unavailable, from_rpc_error
from services.runtime.log import get_logger
from services.runtime.metrics import TokenizerMetrics
from services.runtime.server import MAX_MESSAGE_BYTES
from services.tokenizer.attempts import STALE_OWNER, Attempts
from services.tokenizer.backoff import Backoff
from services.tokenizer.claims import Claims, Held
from services.tokenizer.entry import Attempt, Entry
from services.tokenizer.outbox import UNANSWERED, Outbox, Told
from services.tokenizer.presence import Presence
from services.tokenizer.route import Ended, Perform, Route, TextMessage
from services.tokenizer.wire import (
    claim_answer_from_wire,
    claim_to_wire,
    held_from_wire,
    refusal_from_wire,
    submit_to_wire,
    text_message_from_wire,
)
from tailrace.v1 import detokenizer_pb2, detokenizer_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc

CALL_TIMEOUT_S = 2.0
"""Of one unary call; repeated where it must arrive."""

DETAILS_KEY = "grpc-status-details-bin"

SCHEDULER_STOPPING = "SCHEDULER_STOPPING"
"""With this reason a scheduler ends its streams when its process does."""

_log = get_logger("tokenizer")


class SchedulerLink:
    """One scheduler, as this process reaches it. `on_change` is called when `live` or `why_not` changed."""

    def __init__(
        self,
        address: str,
        detokenizers: Sequence[str],
        *,
        name: str,
        hello: Hello,
        card: ModelCard,
        attempts: Attempts,
        perform: Perform,
        on_change: Callable[[], None],
        clock: Clock,
        metrics: TokenizerMetrics,
        submit_timeout_s: float,
    ) -> None:
        self.address = address
        self._name = name
        self._hello = hello
        self._card = card
        self._attempts = attempts
        self._perform = perform
        self._on_change = on_change
        self._clock = clock
        self._metrics = metrics
        self._submit_timeout_s = submit_timeout_s
        self._channel = connect(address)
        self._scheduler = scheduler_pb2_grpc.SchedulerServiceStub(self._channel)
        self._sources = [_TextSource(source, address, name=name, epoch=hello.epoch) for source in detokenizers]
        self._route = Route(
            address,
            self._sources,
            hello=hello,
            attempts=attempts,
            perform=perform,
            on_change=self._route_changed,
            after_end=self._after_end,
            clock=clock,
            metrics=metrics,
        )
        self._load_hop = Hop(clock)
        self._presence = Presence(address, ask=self._ask_epoch, attempts=attempts, perform=perform, clock=clock)
        self._outbox = Outbox(
            address, abort=self._abort, release=self._release, attempts=attempts, perform=perform, clock=clock
        )

    @property
    def live(self) -> bool:
        """Whether its route is open."""
        return self._route.live

    @property
    def why_not(self) -> str:
        """Why not."""
        return self._route.why_not

    @property
    def context_length(self) -> int:
        """What the scheduler allows, tokens; 0 while unknown."""
        return self._route.context_length

    async def run(self) -> None:
        """Keeps the route and the lease, and sends what is in the outbox, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._route.run(), name=f"route {self.address}")
            tasks.create_task(self._outbox.run(), name=f"outbox {self.address}")
            tasks.create_task(self._keep_reconciled(), name=f"reconciliation {self.address}")
            tasks.create_task(self._keep_lease(), name=f"lease {self.address}")

    async def close(self, timeout_s: float) -> None:
        """Sends what is left in the outbox within the bound, and closes the channels."""
        await self._outbox.close(timeout_s)
        for channel in (self._channel, *(source.channel for source in self._sources)):
            await channel.close()

    def hops(self) -> tuple[HopView, HopView]:
        """Its two long-lived streams, for operators: the route's text, and the scheduler's load."""
        return (
            self._route.view(self._name),
            self._load_hop.view("load", self.address),
        )

    # -- unary calls

    async def submit(self, attempt: Attempt) -> None:
        """Submits an attempt, repeatedly within the bound, for Submit is idempotent; the ledger is told the end."""
        give_up_at = self._clock.now() + self._submit_timeout_s
        backoff = Backoff(0.05, 1.0)
        while True:
            request = self._submission(attempt)
            if (size := request.ByteSize()) > MAX_MESSAGE_BYTES:  # gRPC would call that full, which passes
                too_large = PreconditionFailed(f"with its output so far it takes {size} bytes, more than a message has")
                self._perform(self._attempts.submit_refused(attempt.attempt_id, too_large, self._clock.now()))
                return
            try:
                response = await self._scheduler.Submit(request, timeout=CALL_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                now = self._clock.now()
                if not _unanswered(error):
                    self._perform(self._attempts.submit_refused(attempt.attempt_id, refusal_from_wire(error), now))
                    return
                if now >= give_up_at or attempt.abandoned or self._attempts.get(attempt.attempt_id) is None:
                    unavailable = Unavailable(f"scheduler {self.address} does not answer")
                    self._perform(self._attempts.submit_failed(attempt.attempt_id, unavailable, now))
                    return
                await asyncio.sleep(min(backoff.next(), give_up_at - now))
            else:
                self._perform(self._attempts.submit_answered(attempt.attempt_id, response.epoch, self._clock.now()))
                return

    def abort(self, attempt_id: int) -> None:
        """Has the scheduler stop an attempt, soon and certainly."""
        self._outbox.abort(attempt_id)

    def release(self, attempt_id: int) -> None:
        """Has the scheduler forget an attempt, soon and certainly."""
        self._outbox.release(attempt_id)

    def released(self, attempt_id: int) -> None:
        """Nothing has to be said about an attempt any more."""
        self._outbox.drop(attempt_id)

    def resubscribe(self, why: str) -> None:
        """Has the current call end and the next one begin."""
        self._route.resubscribe(why)

    def reconcile(self) -> None:
        """Asks the scheduler, soon, which of our attempts it has."""
        self._route.opened.set()

    # -- requests of other tokenizers

    async def find(self, tenant: str, request_id: str, timeout_s: float = CALL_TIMEOUT_S) -> Held | None:
        """What the scheduler holds of a request; None for nothing. Raises Unavailable when it does not answer."""
        request = scheduler_pb2.FindRequest(tenant=tenant, request_id=request_id)
        try:
            response = await self._scheduler.Find(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            if error.code() in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNIMPLEMENTED):
                return None  # nothing is held, or by an older neighbour that nobody can claim from
            raise Unavailable(f"scheduler {self.address} can't be asked: {error.details()}") from error
        return held_from_wire(response, self.address, self._card)

    async def claim(self, entry: Entry, number: int, claims: Claims) -> None:
        """Claims a request, until it is answered or not wanted any more; the claims are told the end."""
        if entry.caller_is_final:
            self._perform(claims.gone(entry, self.address, self._clock.now()))
            return
        request = claim_to_wire(
            entry, self.address, tokenizer=self._name, tokenizer_epoch=self._hello.epoch, attempt_number=number
        )
        backoff = Backoff(0.05, 1.0)
        while claims.wanted(entry, self.address):
            try:
                response = await self._scheduler.Claim(request, timeout=CALL_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                if not _unanswered(error):
                    came_too_late = from_rpc_error(error).reason == STALE_OWNER
                    outcome = claims.too_late if came_too_late else claims.gone
                    self._perform(outcome(entry, self.address, self._clock.now()))
                    return
                await asyncio.sleep(backoff.next())
            else:
                answer = claim_answer_from_wire(response)
                self._perform(claims.answered(entry, self.address, answer, self._clock.now()))
                return

    async def abort_of_another(self, attempt_ids: Sequence[int]) -> None:
        """Stops attempts that another tokenizer owns, which tells its caller. Raises Unavailable."""
        request = scheduler_pb2.SchedulerServiceAbortRequest(attempt_ids=attempt_ids)
        try:
            await self._scheduler.Abort(request, timeout=CALL_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise Unavailable(f"scheduler {self.address} can't be asked: {error.details()}") from error

    def _submission(self, attempt: Attempt) -> scheduler_pb2.SubmitRequest:
        deadline = attempt.entry.deadline
        left_ms = 0 if deadline is None else max(1, round((deadline - self._clock.now()) * 1000))
        return submit_to_wire(attempt, tokenizer=self._name, tokenizer_epoch=self._hello.epoch, deadline_in_ms=left_ms)

    async def _abort(self, attempt_ids: Sequence[int]) -> Told:
        request = scheduler_pb2.SchedulerServiceAbortRequest(
            attempt_ids=attempt_ids, tokenizer=self._name, tokenizer_epoch=self._hello.epoch
        )
        response = await self._scheduler.Abort(request, timeout=CALL_TIMEOUT_S)
        return Told(response.epoch, response.stale_attempt_ids)

    async def _release(self, attempt_ids: Sequence[int], timeout_s: float = CALL_TIMEOUT_S) -> Told:
        request = scheduler_pb2.SchedulerServiceReleaseRequest(
            attempt_ids=attempt_ids, tokenizer=self._name, tokenizer_epoch=self._hello.epoch
        )
        response = await self._scheduler.Release(request, timeout=timeout_s)
        return Told(response.epoch, response.stale_attempt_ids)

    async def _ask_epoch(self, timeout_s: float) -> int:
        return (await self._release((), timeout_s)).epoch

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
                    self._presence.heard()
                    backoff.reset()
                    if response.HasField("load"):
                        load = response.load
                        sequences = load.waiting_sequences + load.running_sequences
                        self._attempts.loaded(self.address, sequences, draining=load.draining)

    async def _keep_reconciled(self) -> None:
        while True:
            await self._route.opened.wait()
            self._route.opened.clear()
            await self._reconcile()

    async def _reconcile(self) -> None:
        """With a route newly open, or in doubt, both sides agree on which attempts there are."""
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
                if error.code() not in UNANSWERED:
                    _log.error("scheduler refused to reconcile", scheduler=self.address, why=error.details())
                    return
                await asyncio.sleep(backoff.next())
            else:
                missing, stale = response.missing_attempt_ids, response.stale_attempt_ids
                now = self._clock.now()
                self._perform(self._attempts.reconciled(self.address, response.epoch, missing, now, stale_ids=stale))
                return

    # -- the scheduler itself

    def _route_changed(self) -> None:
        if self._route.live:
            self._presence.heard()
        self._on_change()

    async def _after_end(self, ended: Ended) -> None:
        """With the route down, sees who is there."""
        if ended.reason == SCHEDULER_STOPPING:
            self._presence.stopping()
        await self._presence.look()


class _TextSource:
    """One detokenizer, as the source of one scheduler's text."""

    def __init__(self, address: str, scheduler: str, *, name: str, epoch: int) -> None:
        self.address = address
        self._scheduler = scheduler
        self._name = name
        self._epoch = epoch
        self.channel = connect(address)
        self._stub = detokenizer_pb2_grpc.DetokenizerServiceStub(self.channel)

    @asynccontextmanager
    async def open(self, generation: int) -> AsyncIterator[AsyncIterator[TextMessage]]:
        """A StreamText call of this generation. Raises a TailraceError when it can't be had, or ends as one."""
        key = scheduler_pb2.RouteKey(tokenizer=self._name, tokenizer_epoch=self._epoch, generation=generation)
        request = detokenizer_pb2.StreamTextRequest(route=key, scheduler=self._scheduler)
        try:
            async with open_stream(lambda: self._stub.StreamText(request)) as call:
                yield (text_message_from_wire(response) async for response in call)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error


def _unanswered(error: grpc.aio.AioRpcError) -> bool:
    """Whether the call may not have reached the peer's code. A status with our details was raised by it."""
    answered = any(key == DETAILS_KEY for key, _ in error.trailing_metadata() or ())
    return error.code() in UNANSWERED and not answered
