"""What is looked at inside the services as it happens: transitions, for the table, and what must never happen twice."""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from enum import Enum
from typing import Any

from gateway import state as gateway_state
from services.detokenizer import state as detokenizer_state
from services.scheduler import state as scheduler_state
from services.scheduler.admission import Tombstones
from services.scheduler.core import SchedulerCore
from services.scheduler.sequence import Attempt
from services.scheduler.state import AttemptEvent, AttemptPhase
from services.tokenizer import state as tokenizer_state
from tests.simulation.loop import ProcessLoop
from tests.simulation.world import World

Step = Callable[[Any, Any], Any]

TABLES: dict[str, tuple[Step, Mapping[tuple[Any, Any], Enum]]] = {
    "a gateway's link": (gateway_state.next_link_phase, gateway_state.LINK_TRANSITIONS),
    "a gateway's stream": (gateway_state.next_stream_phase, gateway_state.STREAM_TRANSITIONS),
    "the caller's side in the ledger": (tokenizer_state.after_caller, tokenizer_state.CALLER_TRANSITIONS),
    "the engine's side in the ledger": (tokenizer_state.after_engine, tokenizer_state.ENGINE_TRANSITIONS),
    "a sequence in the detokenizer": (detokenizer_state.after, detokenizer_state.TRANSITIONS),
    "an attempt in the scheduler": (scheduler_state.next_attempt_phase, scheduler_state.ATTEMPT_TRANSITIONS),
    "a sequence in the scheduler": (scheduler_state.next_sequence_phase, scheduler_state.SEQUENCE_TRANSITIONS),
    "a lease in the scheduler": (scheduler_state.next_lease_phase, scheduler_state.LEASE_TRANSITIONS),
}


def no_transition_yet() -> Counter[str]:
    """Every pair of every table, not counted once."""
    return Counter({_named(table, *pair): 0 for table, (_, pairs) in TABLES.items() for pair in pairs})


def probes() -> Iterator[tuple[Any, str, Any]]:
    """What is to be put in place: where, under which name, what."""
    for table, (step, _) in TABLES.items():
        counted = _counted(table, step)
        for module in list(sys.modules.values()):
            if getattr(module, step.__name__, None) is step and module.__name__.startswith(("services", "gateway")):
                yield module, step.__name__, counted
    yield SchedulerCore, "_accept", _accept
    yield Tombstones, "forget_old", _forget_old


def _counted(table: str, step: Step) -> Step:
    names: dict[tuple[Any, Any], str] = {}

    def counting(phase: Any, event: Any) -> Any:
        name = names.get((phase, event))
        if name is None:
            name = names[phase, event] = _named(table, phase, event)
        _world().counts[name] += 1
        return step(phase, event)

    return counting


def _named(table: str, phase: Enum, event: Enum) -> str:
    return f"{table}: {phase.name} ─ {event.name}"


_accept_rightly = SchedulerCore._accept


def _accept(self: SchedulerCore, attempt: Attempt, now: float) -> Any:
    """In one incarnation an attempt begins once: a second time it was retried as another one, or revived.

    And none begins for an owner from whom the request was claimed.
    """
    submission = attempt.submission
    fence = self._ownership.fence_of(submission)
    if submission.fence < fence:
        _world().violated(f"{submission.request_id} has fence {fence}, and an attempt of {submission.fence} begins")
    began: dict[object, str] = self.__dict__.setdefault("began", {})
    for key in (submission.attempt_id, (submission.route, submission.attempt_number)):
        if key in began:
            _world().violated(f"a scheduler begins an attempt of {submission.request_id} again, after {began[key]}")
        began[key] = f"{submission.attempt_id:x}, number {submission.attempt_number}"
    return _accept_rightly(self, attempt, now)


_forget_old_rightly = Tombstones.forget_old


def _forget_old(self: Tombstones, now: float) -> None:
    """A tombstone has no phase of its own: its end is counted where it comes."""
    before = len(self)
    _forget_old_rightly(self, now)
    forgotten = _named("an attempt in the scheduler", AttemptPhase.RELEASED, AttemptEvent.FORGET)
    _world().counts[forgotten] += before - len(self)


def _world() -> World:
    loop = asyncio.get_running_loop()
    assert isinstance(loop, ProcessLoop)
    return loop.world
