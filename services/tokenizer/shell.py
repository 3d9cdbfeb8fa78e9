"""The shell around the ledger: it performs the ledger's effects, and lets callers in, through and out.

Both doors, the gateways' TokenizerService and this process's own GenerationService, open and end requests here.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import assert_never

from services.protocol.answer import Offsets
from services.protocol.events import AbortOutcome
from services.protocol.model_card import ModelCard
from services.protocol.parse import parse_chat, parse_generate, parse_offsets
from services.protocol.request import ChatPrompt, IdsPrompt, TextPrompt, ValidRequest
from services.runtime.clock import Clock
from services.runtime.error_tree import InvalidRequest, NotFound, TailraceError, Unavailable
from services.runtime.log import get_logger
from services.runtime.trace import TraceContext
from services.tokenizer.acceptance import deadline_of, pin
from services.tokenizer.chat_template import ChatTemplate
from services.tokenizer.core import Ledger
from services.tokenizer.effects import (
    Accept,
    Claim,
    Effect,
    Effects,
    Finished,
    Forget,
    LetGo,
    Progressed,
    Reconcile,
    Refuse,
    Released,
    Resubscribe,
    SendAbort,
    SendRelease,
    Submit,
    Unacceptable,
    Wake,
)
from services.tokenizer.encoder import Encoder
from services.tokenizer.entry import Attempt, Entry, Reader
from services.tokenizer.observer import Observer
from services.tokenizer.takeover import TakeOver
from services.tokenizer.upstream import SchedulerLink
from services.tokenizer.wire import record_to_wire
from tailrace.v1 import generation_pb2

TICK_S = 0.1

OpenPb = generation_pb2.GenerateRequest | generation_pb2.ChatRequest
AddReader = Callable[[Entry], Reader]

_log = get_logger("tokenizer")


class Shell:
    """One process's requests. `links` by scheduler address; filled by app.py, which makes them with `perform`."""

    def __init__(
        self,
        *,
        card: ModelCard,
        ledger: Ledger,
        encoder: Encoder,
        template: ChatTemplate,
        links: Mapping[str, SchedulerLink],
        observer: Observer,
        clock: Clock,
    ) -> None:
        self._card = card
        self._ledger = ledger
        self._encoder = encoder
        self._template = template
        self._links = links
        self._observer = observer
        self._clock = clock
        self._openers: dict[Entry, list[asyncio.Future[None]]] = {}
        self._waiting: dict[Entry, list[asyncio.Future[None]]] = {}
        self._takeover = TakeOver(ledger, links, clock, perform=self.perform, until_accepted=self._until_accepted)
        self._empty: asyncio.Future[None] | None = None
        self._tasks: asyncio.TaskGroup | None = None
        self._refusing: str | None = None

    @property
    def context_length(self) -> int:
        """What a request may use, tokens: the least of what the model and the schedulers allow."""
        return min(
            [self._card.context_length, *(link.context_length for link in self._links.values() if link.context_length)]
        )

    # -- requests

    async def open(
        self,
        pb: OpenPb,
        *,
        tenant: str,
        deadline_s: float | None,
        add_reader: AddReader,
        check: Callable[[], object] = lambda: None,
        fresh_id: bool = False,
        by_gateway: bool = False,
        trace: TraceContext | None = None,
    ) -> Entry:
        """Accepts a request; `add_reader` is called once it is in the ledger, before anything of it can come.

        `check` is called just before that, and may refuse it: encoding took its time, and the caller may have left.
        With `fresh_id` its id was made for it alone; any other is looked for at the schedulers, for a dead tokenizer
        may have left the same request there. `trace`: the caller's call.
        Raises a TailraceError when it is refused, and then nothing of it is left here.
        """
        arrived_at = self._clock.now()
        request = self._parse(pb)
        attach = partial(self._attach, add_reader=add_reader, trace=trace, arrived_at=arrived_at)
        if (same := self._ledger.find(tenant, request)) is not None:
            return await attach(same)
        self._check_open()
        self._ledger.check_room(request)
        deadline = deadline_of(request, deadline_s, arrived_at)
        if request.request_id and not fresh_id:
            left = await self._takeover.same(tenant, request, from_present=by_gateway)
            if left is not None:
                check()
                return await attach(left)
        encoding_at = self._clock.now()
        ids = await self._prompt_ids(request)
        pinned = pin(request, ids, context_length=self.context_length, random_bits=secrets.randbits)
        check()
        if (same := self._ledger.find(tenant, request)) is not None:
            return await attach(same)
        self._check_open()
        entry, effects = self._ledger.open(
            pinned,
            tenant=tenant,
            scheduler=self._choose_scheduler(),
            deadline=deadline,
            now=self._clock.now(),
            unix_ms=self._clock.unix_ms(),
        )
        entry.trace = trace
        entry.record = record_to_wire(pb, entry.started, entry.pinned.request.stopping.max_tokens or 1, trace)
        self._observer.opened(entry, arrived_at=arrived_at, encoding_at=encoding_at)
        reader = add_reader(entry)
        self.perform(effects)
        await self._accepted(entry, reader)
        return entry

    async def resume(
        self,
        pb: generation_pb2.ResumeRequest,
        *,
        tenant: str,
        add_reader: Callable[[Entry, Offsets], object],
        only_here: bool = False,
        trace: TraceContext | None = None,
    ) -> Entry:
        """Takes up a request again; `add_reader` is given where its caller stands, and raises ValueError beyond that.

        One that is not known here is claimed where a scheduler holds it, unless `only_here`. Raises NotFound;
        InvalidRequest at once for offsets beyond what there is; Unavailable when it can't be told now.
        """
        arrived_at = self._clock.now()
        try:
            entry = self._ledger.resumable(tenant, pb.request_id, pb.resume_token)
        except NotFound:
            if only_here:
                raise
            self._check_open()
            entry = await self._takeover.by_token(tenant, pb.request_id, pb.resume_token)
        await self._until_accepted(entry)  # it may just be being claimed for somebody else
        offsets = parse_offsets(pb.offsets, "offsets", entry.pinned.request.n)
        await self._takeover.rebuilt(entry, offsets)
        try:
            add_reader(entry, offsets)
        except ValueError as error:
            raise InvalidRequest("offsets", str(error)) from None
        self._ledger.attach(entry)
        self._observer.resumed(entry, trace, arrived_at)
        return entry

    def end(self, entry: Entry, delivered: bool) -> None:
        """The caller's side of a request has ended: it has the terminal event, or it left."""
        now = self._clock.now()
        # A terminal event can only be delivered once there is one.
        end = self._ledger.delivered if delivered and entry.completed else self._ledger.left
        self.perform(end(entry, now))

    async def abort(
        self, tenant: str, request_id: str, *, wait_until_released: bool, only_here: bool = False
    ) -> AbortOutcome:
        """Stops a request by its exact id, here or, unless `only_here`, wherever it is."""
        outcome, entry, effects = self._ledger.abort(tenant, request_id, self._clock.now())
        self.perform(effects)
        if outcome is AbortOutcome.NOT_FOUND and request_id and not only_here:
            return await self._takeover.abort(tenant, request_id, wait_until_released=wait_until_released)
        if entry is not None and wait_until_released and not entry.forgotten:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.setdefault(entry, []).append(waiter)
            await waiter
        return outcome

    # -- the process's life

    async def run(self, expire: Callable[[float], None]) -> None:
        """Keeps routes and time going until cancelled; `expire` is given the time at every tick."""
        async with asyncio.TaskGroup() as tasks:
            self._tasks = tasks
            for link in self._links.values():
                tasks.create_task(link.run(), name=f"link {link.address}")
            tasks.create_task(self._template.load(), name="chat template")
            while True:
                await asyncio.sleep(TICK_S)
                now = self._clock.now()
                expire(now)
                self.perform(self._ledger.tick(now))

    async def drain(self) -> None:
        """Refuses new requests and returns when none is open; answers that are only kept are not waited for."""
        self._refusing = "the tokenizer is draining"
        self.perform(self._ledger.keep_nothing(self._clock.now()))
        await self._until_empty()

    def leave(self) -> None:
        """Leaves what is open to another tokenizer."""
        self._refusing = "the tokenizer is shutting down"
        self.perform(self._ledger.leave_all(self._clock.now()))

    async def close(self, timeout_s: float) -> None:
        """After `leave`: lets readers take what is whole, and releases it."""
        now = self._clock.now()
        for link in self._links.values():
            self.perform(self._ledger.attempts.route_lost(link.address, now))
        flushing = [asyncio.create_task(link.close(timeout_s)) for link in self._links.values()]
        try:
            async with asyncio.timeout(timeout_s):
                await self._until_empty()
        except TimeoutError:
            _log.warning("stopped before every caller had its end", open_requests=len(self._ledger))
        await asyncio.gather(*flushing)

    # -- effects

    def perform(self, effects: Effects) -> None:
        """Does what the ledger wants done. Never fails: what it starts has owners of its own."""
        for effect in effects:
            self._perform(effect)

    def _perform(self, effect: Effect) -> None:  # noqa: C901  # one case per effect
        match effect:
            case Wake(entries):
                for entry in entries:
                    for reader in entry.readers:
                        reader.mark()
            case Progressed():
                self._observer.progressed(effect)
            case Submit(attempt):
                self._submit(attempt)
            case Claim(entry, places):
                self._claim(entry, places)
            case Reconcile(scheduler):
                self._links[scheduler].reconcile()
            case SendAbort(attempt):
                self._links[attempt.scheduler].abort(attempt.attempt_id)
            case SendRelease(scheduler, attempt_id):
                self._links[scheduler].release(attempt_id)
            case Accept(entry):
                self._answer(entry, None)
            case Refuse(entry, error):
                self._answer(entry, error)
            case Finished(entry):
                self._observer.finished(entry)
            case Unacceptable(entry, why):
                self._observer.unacceptable(entry, why)
            case Released(attempt):
                self._observer.released(attempt)
                self._links[attempt.scheduler].released(attempt.attempt_id)
            case LetGo(entry):
                self._observer.let_go(entry)
            case Forget(entry):
                self._forgotten(entry)
            case Resubscribe(scheduler, why):
                self._links[scheduler].resubscribe(why)
            case _:
                assert_never(effect)

    def _submit(self, attempt: Attempt) -> None:
        assert self._tasks is not None, "a request was opened before run()"
        self._observer.submitted(attempt)
        self._tasks.create_task(self._links[attempt.scheduler].submit(attempt), name=f"submit {attempt.attempt_id:x}")

    def _claim(self, entry: Entry, places: Sequence[tuple[str, int]]) -> None:
        assert self._tasks is not None, "a request was claimed before run()"
        self._observer.claiming(entry)
        self._tasks.create_task(self._claim_in_turn(entry, places), name=f"claim {entry.request_id}")

    async def _claim_in_turn(self, entry: Entry, places: Sequence[tuple[str, int]]) -> None:
        for scheduler, number in places:
            await self._links[scheduler].claim(entry, number, self._ledger.claims)

    def _answer(self, entry: Entry, error: TailraceError | None) -> None:
        if error is None:
            self._observer.accepted(entry)
        else:
            self._observer.refused(entry, error)
        for opener in self._openers.pop(entry, ()):
            if opener.done():
                continue
            if error is None:
                opener.set_result(None)
            else:
                opener.set_exception(error)

    def _forgotten(self, entry: Entry) -> None:
        self._observer.forgotten(entry)
        self._openers.pop(entry, None)
        for waiter in self._waiting.pop(entry, ()):
            if not waiter.done():
                waiter.set_result(None)
        if self._empty is not None and not self._empty.done() and not len(self._ledger):
            self._empty.set_result(None)

    # -- opening

    def _parse(self, pb: OpenPb) -> ValidRequest:
        if isinstance(pb, generation_pb2.ChatRequest):
            return parse_chat(pb, self._card)
        return parse_generate(pb, self._card)

    def _check_open(self) -> None:
        if self._refusing is not None:
            raise Unavailable(self._refusing, reason="DRAINING")

    async def _prompt_ids(self, request: ValidRequest) -> list[int]:
        match request.prompt:
            case TextPrompt(text):
                return await self._encoder.encode(text, add_special_tokens=True, field="text")
            case IdsPrompt(ids):
                return list(ids)
            case ChatPrompt(messages):
                self._encoder.check_size(sum(len(m.content) + len(m.role) for m in messages), "messages")
                text = await self._template.render(messages, "messages")
                # The template writes special tokens out, BOS among them.
                return await self._encoder.encode(text, add_special_tokens=False, field="messages")

    def _choose_scheduler(self) -> str:
        """The least busy scheduler. Raises Unavailable."""
        scheduler = self._ledger.schedulers.least_busy()
        if scheduler is None:
            why = "; ".join(f"scheduler {link.address}: {link.why_not}" for link in self._links.values())
            raise Unavailable(f"no route is open: {why}", reason="NO_ROUTE")
        return scheduler

    async def _attach(
        self, entry: Entry, *, add_reader: AddReader, trace: TraceContext | None, arrived_at: float
    ) -> Entry:
        """The same request once more: one run, one more reader."""
        reader = add_reader(entry)
        self._ledger.attach(entry)
        await self._accepted(entry, reader)
        self._observer.attached(entry, trace, arrived_at)
        return entry

    async def _accepted(self, entry: Entry, reader: Reader) -> None:
        """Waits for the scheduler's word. A caller that leaves meanwhile is gone."""
        try:
            await self._until_accepted(entry)
        except asyncio.CancelledError:
            entry.drop(reader)
            self.end(entry, False)
            raise

    async def _until_accepted(self, entry: Entry) -> None:
        """Returns once a scheduler has it for us. Raises its refusal."""
        if not entry.accepted:
            opener: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._openers.setdefault(entry, []).append(opener)
            await opener

    async def _until_empty(self) -> None:
        if len(self._ledger):
            self._empty = asyncio.get_running_loop().create_future()
            await self._empty
