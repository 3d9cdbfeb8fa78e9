"""A caller: asks, reads in its own manner, leaves, comes back, and says in the end how it fared."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from services.protocol.events import Event, FinishReason
from services.protocol.wire import event_from_wire
from tailrace.v1 import generation_pb2, generation_pb2_grpc
from tests.simulation.answer import Answer, BrokenPromise
from tests.simulation.network import Network
from tests.simulation.process import Process
from tests.simulation.request import Behaviour
from tests.simulation.world import World

RETRY_S = 0.2
MAX_RETRIES = 30


@dataclass(frozen=True)
class Outcome:
    """How a caller fared: "completed", "refused", "cut", "lost" (a resume was refused), "left", "died".

    `code` of what ended it, `message` of that, `reasons` of the choices' finishes.
    """

    kind: str
    code: str = ""
    message: str = ""
    reasons: tuple[FinishReason, ...] = ()


class Caller(Process):
    """One caller and its answer; `outcome` once it is done."""

    def __init__(self, world: World, network: Network, name: str, behaviour: Behaviour, *, echo: bool) -> None:
        super().__init__(world, network, name)
        self.behaviour = behaviour
        self.answer = Answer(behaviour.request, echo=echo)
        self.outcome: Outcome | None = None
        self.asked_at = 0.0
        self.ended_at = 0.0
        self.aborted: tuple[str, float, float] | None = None
        """Which request it had aborted, from when to when the call was under way."""
        self._stub: Any = None
        self._events = 0

    def begin(self) -> None:
        """Starts it; what is planned for it follows."""
        self.asked_at = self.world.now
        self.start(self._live)
        behaviour, world = self.behaviour, self.world
        if behaviour.vanishes and behaviour.leaves_after is not None:
            world.after(behaviour.leaves_after, self._die)

    async def _live(self) -> None:
        outcome = await self._fare()
        self._done(outcome)

    async def _fare(self) -> Outcome:
        behaviour = self.behaviour
        self._stub = generation_pb2_grpc.GenerationServiceStub(grpc.aio.insecure_channel(behaviour.door))
        aborting = None
        if behaviour.aborts_after is not None:
            aborting = asyncio.get_running_loop().create_task(self._abort(behaviour.aborts_after))
        outcome = await self._read_first()
        for _ in range(MAX_RETRIES):
            if not self._comes_back(outcome):
                break
            await asyncio.sleep(behaviour.back_after or RETRY_S)
            outcome = await self._resume()
        if aborting is not None:
            await aborting
        return outcome

    async def _read_first(self) -> Outcome:
        behaviour = self.behaviour
        call = self._stub.Generate(behaviour.request.to_wire(), timeout=behaviour.deadline_s)
        if behaviour.leaves_after is not None and not behaviour.vanishes:
            asyncio.get_running_loop().call_later(behaviour.leaves_after, call.cancel)
        return await self._read(call)

    async def _resume(self) -> Outcome:
        started = self.answer.started
        assert started is not None
        pb = generation_pb2.ResumeRequest(request_id=started.request_id, resume_token=started.resume_token)
        for number, choice in enumerate(self.answer.choices):
            pb.offsets.add(choice=number, token_offset=len(choice.ids), text_offset=len(choice.text))
        self.world.count("resume asked")
        outcome = await self._read(self._stub.Resume(pb))
        return Outcome("lost", outcome.code, outcome.message) if outcome.kind == "refused" else outcome

    async def _read(self, call: Any) -> Outcome:
        """One stream to its end. What came is checked as it comes."""
        self.answer.begin_stream()
        events = 0
        try:
            async for pb in call:
                event = event_from_wire(pb)
                assert event is not None
                events += 1
                self._take(event)
                await self._dawdle(events)
            self._check(self.answer.end_of_stream)
        except grpc.aio.AioRpcError as error:
            kind = "cut" if events else "refused"
            return Outcome(kind, error.code().name, error.details() or "", self._reasons())
        except asyncio.CancelledError:
            if not call.cancelled():
                raise
            return Outcome("left", reasons=self._reasons())
        return Outcome("completed", reasons=self._reasons())

    async def _dawdle(self, events: int) -> None:
        behaviour = self.behaviour
        if behaviour.pause_s:
            await asyncio.sleep(behaviour.pause_s)
        if behaviour.stops_reading_for and events == 3:
            await asyncio.sleep(behaviour.stops_reading_for)

    async def _abort(self, delay_s: float) -> None:
        """By its id, which it knows from Started or gave itself."""
        await asyncio.sleep(delay_s)
        request_id = self.behaviour.request.request_id
        if not request_id and self.answer.started is not None:
            request_id = self.answer.started.request_id
        if not request_id:
            return
        pb = generation_pb2.AbortRequest(request_id=request_id, wait_until_released=self.behaviour.waits_until_released)
        sent_at = self.world.now
        self.aborted = (request_id, sent_at, float("inf"))
        try:
            answer = await self._stub.Abort(pb, timeout=3.0)
            self.world.count(f"abort: {generation_pb2.AbortOutcome.Name(answer.outcome)}")
            self.aborted = (request_id, sent_at, self.world.now)
        except grpc.aio.AioRpcError as error:
            self.world.count(f"abort: {error.code().name}")

    def _comes_back(self, outcome: Outcome) -> bool:
        """Whether it asks for the rest: after a cut where its request outlives that, after leaving as planned."""
        request = self.behaviour.request
        if self.answer.started is None or self.answer.completed is not None:
            return False
        if outcome.kind == "left":
            return self.behaviour.back_after is not None
        if outcome.kind == "lost":
            return outcome.code in ("UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED")
        return outcome.kind == "cut" and (request.detach or request.retain_s > 0)

    def _take(self, event: Event) -> None:
        if self.world.tells:
            self.world.tell(self.name, f"has {event}")
        self._check(lambda: self.answer.take(event))

    def _check(self, act: Any) -> None:
        try:
            act()
        except BrokenPromise as broken:
            self.world.violated(f"{self.name}: {broken}")

    def _reasons(self) -> tuple[FinishReason, ...]:
        return tuple(finish.reason for finish in self.answer.finishes)

    def _die(self) -> None:
        if self.alive and self.outcome is None:
            self.kill(silently=self.world.chance(0.5))
            self._done(Outcome("died"))

    def _done(self, outcome: Outcome) -> None:
        self.outcome = outcome
        self.ended_at = self.world.now
        self.world.count(f"caller: {outcome.kind} {outcome.code}".rstrip())
        for reason in outcome.reasons:
            self.world.count(f"finish: {reason.name}")
        self.world.tell(self.name, f"is done: {outcome}")
