"""The route from one scheduler: one StreamText call after the other, its generation one higher with each.

A call that ends, breaks the protocol or stays silent is followed by the next one, at the next detokenizer where there
are several; the ledger drops what it has already. When a detokenizer drains, the next call is opened first: the old one
is read until the new one's hello, and ignored from then on.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

from services.protocol.hello import Hello, mismatch
from services.protocol.hop import Hop
from services.protocol.sender import SUSPECT_S
from services.protocol.views import HopView, RouteKey
from services.runtime.clock import Clock
from services.runtime.error_tree import TailraceError
from services.runtime.metrics import TokenizerMetrics
from services.tokenizer.assembler import RouteCall, TextBatch
from services.tokenizer.attempts import Attempts
from services.tokenizer.backoff import Backoff
from services.tokenizer.effects import Effects

Perform = Callable[[Effects], None]


@dataclass(frozen=True, slots=True)
class RouteHello:
    """Who stands behind a call."""

    detokenizer: Hello
    scheduler: Hello


@dataclass(frozen=True, slots=True)
class Draining:
    """The detokenizer takes no new routes and will stop."""


TextMessage = RouteHello | TextBatch | Draining
Messages = AbstractAsyncContextManager[AsyncIterator[TextMessage]]


class Detokenizer(Protocol):
    """Where text can come from. `open` may raise a TailraceError at any message."""

    address: str

    def open(self, generation: int) -> Messages: ...


@dataclass(frozen=True, slots=True)
class Ended:
    """Why a call is over, for people; `reason`: its error's, for programs."""

    why: str
    reason: str = ""


class _Broken(Exception):
    """The call can't go on; the message says why."""


@dataclass(slots=True, eq=False)
class _Call:
    """One StreamText call, until its end. `opened`: its hello has come."""

    detokenizer: Detokenizer
    generation: int
    opened: asyncio.Event = field(default_factory=asyncio.Event)
    draining: asyncio.Event = field(default_factory=asyncio.Event)


class Route:
    """The route of one scheduler. `on_change` is called when `live` or `why_not` changed.

    `after_end` is awaited after each call that was not replaced.
    """

    def __init__(
        self,
        scheduler: str,
        detokenizers: Sequence[Detokenizer],
        *,
        hello: Hello,
        attempts: Attempts,
        perform: Perform,
        on_change: Callable[[], None],
        after_end: Callable[[Ended], Coroutine[Any, Any, None]],
        clock: Clock,
        metrics: TokenizerMetrics,
    ) -> None:
        self.live = False
        self.why_not = "its route is not open yet"
        self.context_length = 0
        self.opened = asyncio.Event()
        self._scheduler = scheduler
        self._detokenizers = detokenizers
        self._hello = hello
        self._attempts = attempts
        self._perform = perform
        self._on_change = on_change
        self._after_end = after_end
        self._clock = clock
        self._metrics = metrics
        self._generation = 0
        self._current: _Call | None = None
        self._peer: Hello | None = None
        self._hop = Hop(clock, self.why_not)
        self._broken: str | None = None

    async def run(self) -> None:
        """Keeps a call open until cancelled."""
        backoff = Backoff(0.05, 1.0)
        while True:
            ended = await self._follow_and_move()
            if self.live:
                backoff.reset()
            self._lose(ended)
            await self._after_end(ended)
            await asyncio.sleep(backoff.next())

    def view(self, tokenizer: str) -> HopView:
        """Where its newest call stands, for operators."""
        key = RouteKey(tokenizer=tokenizer, tokenizer_epoch=self._hello.epoch, generation=self._generation)
        sender = self._detokenizer(self._generation).address
        return self._hop.view("text", sender, scheduler=self._scheduler, hello=self._peer, route=key)

    def resubscribe(self, why: str) -> None:
        """Has the current call end and the next one begin."""
        self._broken = why

    async def _follow_and_move(self) -> Ended:
        """A call, and those that take its place while it drains, until one ends without a successor."""
        call = self._next_call()
        following = asyncio.create_task(self._follow(call), name=f"route {self._scheduler}")
        try:
            while True:
                await _first_of(following, call.draining)
                if following.done():
                    return following.result()
                successor = await self._move(following)
                if successor is None:
                    return following.result()
                call, following = successor
        finally:
            await _end(following)

    async def _move(self, old: asyncio.Task[Ended]) -> tuple[_Call, asyncio.Task[Ended]] | None:
        """Opens the next call while the old one goes on, and then ends it; None when that one ended before."""
        backoff = Backoff(0.05, 1.0)
        while True:
            call = self._next_call()
            following = asyncio.create_task(self._follow(call), name=f"next route {self._scheduler}")
            try:
                await _first_of(following, call.opened)
            except asyncio.CancelledError:
                await _end(following)
                raise
            if call.opened.is_set():
                await _end(old)
                return call, following
            if old.done():
                return None
            await asyncio.wait([old], timeout=backoff.next())

    def _next_call(self) -> _Call:
        self._generation += 1
        self._broken = None
        self._hop.called()
        return _Call(self._detokenizer(self._generation), self._generation)

    def _detokenizer(self, generation: int) -> Detokenizer:
        return self._detokenizers[(generation - 1) % len(self._detokenizers)]

    async def _follow(self, call: _Call) -> Ended:
        """One call from its opening to its end."""
        try:
            async with call.detokenizer.open(call.generation) as messages:
                await self._read(call, messages)
        except TimeoutError:
            return Ended(f"{call.detokenizer.address}: silent for {SUSPECT_S:g} s")
        except TailraceError as error:
            return Ended(f"{call.detokenizer.address}: {error.message}", error.reason)
        except _Broken as broken:
            return Ended(f"{call.detokenizer.address}: {broken}")
        return Ended(f"{call.detokenizer.address}: it ended the stream")

    async def _read(self, call: _Call, messages: AsyncIterator[TextMessage]) -> None:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(SUSPECT_S) as silence:
            route: RouteCall | None = None
            async for message in messages:
                silence.reschedule(loop.time() + SUSPECT_S)
                # Of a call that is being replaced no more than that it lives: its clock is another one.
                batch = message if isinstance(message, TextBatch) and self._current is call else None
                self._hop.heard(batch.news_us if batch is not None else 0)
                if route is None:
                    route = self._opened(call, message)
                elif self._current is not call:
                    return  # another one has taken its place
                elif isinstance(message, TextBatch):
                    self._take(route, message)
                elif len(self._detokenizers) > 1:
                    call.draining.set()

    def _take(self, route: RouteCall, batch: TextBatch) -> None:
        repeated, late = route.repeated_tokens, route.late_tokens
        self._perform(route.apply(batch, self._clock.now()))
        self._metrics.output_tokens_total.inc(len(batch.token_ids))
        if route.repeated_tokens != repeated:
            self._metrics.duplicates_dropped_total.inc(route.repeated_tokens - repeated)
        if route.late_tokens != late:
            self._metrics.late_tokens_total.inc(route.late_tokens - late)
        if self._broken is not None:
            raise _Broken(self._broken)

    def _opened(self, call: _Call, message: TextMessage) -> RouteCall:
        """The first message, which must be a hello of two processes that fit; from now on this call is the route."""
        if not isinstance(message, RouteHello):
            raise _Broken("its first message is not a hello")
        scheduler = message.scheduler
        for who, theirs in (("detokenizer", message.detokenizer), ("scheduler", scheduler)):
            why = mismatch(self._hello, theirs)
            if why is not None:
                raise _Broken(f"{who} does not fit: {why}")
        if self._current is not None:
            self._perform(self._attempts.route_lost(self._scheduler, self._clock.now()))
        self._current = call
        self._hop.opened()
        self.context_length, self._peer = scheduler.context_length, scheduler
        self._metrics.route_opens_total.inc()
        self._perform(self._attempts.route_opened(self._scheduler, scheduler.epoch, self._clock.now()))
        self._set_live(True, "")
        self.opened.set()
        call.opened.set()
        return RouteCall(self._attempts, self._scheduler, scheduler.epoch)

    def _lose(self, ended: Ended) -> None:
        self._current = None
        self._set_live(False, ended.why)
        self._perform(self._attempts.route_lost(self._scheduler, self._clock.now()))

    def _set_live(self, live: bool, why_not: str) -> None:
        if (live, why_not) == (self.live, self.why_not):
            return
        self._metrics.routes_ready.inc(int(live) - int(self.live))
        self.live, self.why_not = live, why_not
        if not live:
            self._hop.lost(why_not)
        self._on_change()


async def _first_of(task: asyncio.Task[Ended], event: asyncio.Event) -> None:
    """Returns when the task is over or the event is set."""
    waiting = asyncio.create_task(event.wait())
    try:
        await asyncio.wait([task, waiting], return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()


async def _end(task: asyncio.Task[Ended]) -> None:
    task.cancel()
    await asyncio.wait([task])
