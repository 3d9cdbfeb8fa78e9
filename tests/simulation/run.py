"""One plan from its first moment to the last: trouble, mending, and then everybody has an end and nothing is left."""

from __future__ import annotations

import gc
import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from services.protocol.sender import SUSPECT_S
from services.runtime import log
from tests.simulation import model
from tests.simulation.caller import Caller
from tests.simulation.deployment import GRACES_S, Deployment
from tests.simulation.excuses import unexcused
from tests.simulation.network import Network
from tests.simulation.plan import TROUBLE_S, Fault, Plan
from tests.simulation.process import Process, Service
from tests.simulation.request import Behaviour, Request
from tests.simulation.world import Violation, World

LOOK_EVERY_S = 0.25
END_WITHIN_S = 40.0
"""After the last trouble, callers have their ends and every ledger is empty within this time."""


@dataclass(frozen=True)
class Result:
    """What a run came to. `violation`: the promise that was broken; None: none was."""

    plan: Plan
    callers: Sequence[Caller]
    violation: str | None
    counts: Counter[str]
    story: Sequence[str]
    virtual_s: float


class Run:
    """A plan under way."""

    def __init__(self, plan: Plan, *, tells: bool) -> None:
        self.plan = plan
        self.world = World(plan.seed, tells=tells)
        self.network = Network(self.world, window=plan.shape.window)
        self.deployment = Deployment(self.world, self.network, plan.shape)
        self.callers: list[Caller] = []

    def go(self) -> None:
        """Raises Violation."""
        for service in self.deployment.services.values():
            service.launch()
        for behaviour in self.plan.callers:
            self._add_caller(behaviour)
        for fault in self.plan.faults:
            self.world.at(fault.at, partial(self._befall, fault))
        self._advance(TROUBLE_S[1] if self.plan.faults else 0.0)
        self._mend()
        self._wait_until_idle(self.world.now + max((b.at for b in self.plan.callers), default=0.0) + END_WITHIN_S)
        self._serve_one_more()
        for process in self._processes():
            if lost := process.lost_errors():
                raise Violation(f"{process.name}: nobody asked what became of {lost}")
        for caller in self.callers:
            why = unexcused(caller, self.callers, self.plan)
            if why:
                raise Violation(f"{caller.name}: {why}")

    def end(self) -> None:
        """Nothing of it is left in this process."""
        self.world.stop()
        logging.getLogger(log.ROOT).setLevel(logging.CRITICAL + 1)
        for process in self._processes():
            process.bury()

    def _processes(self) -> list[Process]:
        return [*self.deployment.services.values(), *self.callers]

    def _add_caller(self, behaviour: Behaviour) -> Caller:
        name = behaviour.name or f"caller-{len(self.callers) + 1}"
        caller = Caller(self.world, self.network, name, behaviour, echo=self.plan.shape.echo)
        self.callers.append(caller)
        self.world.at(behaviour.at, caller.begin)
        return caller

    def _advance(self, until: float) -> None:
        while self.world.now < until:
            self.world.run(min(self.world.now + LOOK_EVERY_S, until))
            self._check_integrity()

    def _check_integrity(self) -> None:
        try:
            self.deployment.check_integrity()
        except AssertionError as error:
            raise Violation(f"a scheduler's accounts are wrong: {error!r}") from error

    def _wait_until_idle(self, until: float) -> None:
        while open_ends := self._open_ends():
            if self.world.now >= until:
                raise Violation(f"{END_WITHIN_S:g} s after the last trouble there is still: {open_ends}")
            self._advance(min(self.world.now + LOOK_EVERY_S, until))

    def _open_ends(self) -> dict[str, object]:
        waiting = [caller.name for caller in self.callers if caller.outcome is None]
        if waiting:
            return {"callers without an end": waiting}
        return {**self.deployment.not_ready()} or self.deployment.left_behind()

    def _serve_one_more(self) -> None:
        """After everything, a plain request at each door has a plain answer."""
        request = Request(prompt_ids=(5, 6, 7), max_tokens=4, ignore_eos=True)
        if self.plan.faults:
            self._advance(self.world.now + SUSPECT_S)  # whoever lost its peer has noticed
        doors = [service.address for kind in ("gateway", "tokenizer") for service in self.deployment.of(kind)]
        at_a_time = len(doors) if self.plan.shape.is_roomy else 1
        for first in range(0, len(doors), at_a_time):
            asked = [Behaviour(at=self.world.now, door=door, request=request) for door in doors[first:][:at_a_time]]
            last = [self._add_caller(behaviour) for behaviour in asked]
            self._wait_until_idle(self.world.now + GRACES_S)
            for outcome in (caller.outcome for caller in last):
                if outcome is None or outcome.kind != "completed":
                    raise Violation(f"a plain request after all trouble fares so: {outcome}")

    # -- trouble

    def _befall(self, fault: Fault) -> None:
        if self.world.now >= TROUBLE_S[1]:
            return
        what = f"{fault.kind} {fault.process} {fault.other}".strip()
        self.world.tell("TROUBLE", f"{what} for {fault.lasts_s:.2f} s")
        self.world.count(f"fault: {fault.kind} {fault.process.rpartition('-')[0]}".rstrip())
        mend_at = min(self.world.now + fault.lasts_s, TROUBLE_S[1])
        match fault.kind:
            case "block":
                self.network.block(fault.process, fault.other, mend_at - self.world.now)
            case "cut":
                self.network.cut(fault.process, fault.other)
            case "slow down":
                self.network.slow_down(fault.process, mend_at - self.world.now, fault.strength)
            case "unary trouble":
                self.network.unary_trouble = fault.strength
            case "late calls":
                self.network.late_calls[fault.other] = fault.strength
            case "stream trouble":
                self.network.stream_trouble_s = fault.strength
            case _:
                self._strike(self.deployment.services[fault.process], fault.kind, mend_at)

    def _strike(self, service: Service, kind: str, mend_at: float) -> None:
        match kind:
            case "kill" | "kill silently":
                service.kill(silently=kind == "kill silently")
                self.world.at(mend_at, partial(self._revive, service))
            case "misfit":
                self._restart(service, model.another_directory())
                self.world.at(mend_at, partial(self._restart, service))
            case "pause":
                service.pause()
                self.world.at(mend_at, service.resume)
            case "drain":
                service.drain()
                self.world.at(mend_at, partial(self._revive, service))
            case _:
                raise ValueError(f"no fault is called {kind!r}")

    def _revive(self, service: Service) -> None:
        """Starts what does not run; a drained one may take longer than planned."""
        if not service.alive:
            self.world.tell("TROUBLE", f"{service.name} is started again")
            service.launch()

    def _restart(self, service: Service, model: Path | None = None) -> None:
        """Kills it, and starts it with a model of its own."""
        service.kill()
        service.launch(model)

    def _mend(self) -> None:
        """From now on everything works, and what is draining is started again once it has stopped."""
        self.world.tell("TROUBLE", "is over")
        self.network.clear_up()
        for service in self.deployment.services.values():
            service.resume()
            self._keep_alive(service)

    def _keep_alive(self, service: Service) -> None:
        self._revive(service)
        self.world.after(1.0, partial(self._keep_alive, service))


def run(plan: Plan, *, tells: bool = False) -> Result:
    """Runs a plan; `tells`: with its story. Substitutes must be in place."""
    gc.disable()
    under_way = Run(plan, tells=tells)
    violation: str | None = None
    with _logs_of(under_way.world):
        try:
            under_way.go()
        except Violation as broken:
            violation = str(broken)
        finally:
            under_way.end()
            gc.enable()
    world = under_way.world
    return Result(plan, under_way.callers, violation, world.counts, world.story, world.now)


class _Story(logging.Handler):
    """Services' logs as lines of the story; an error that they log is a broken promise."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def emit(self, record: logging.LogRecord) -> None:
        if self._world.over:
            return
        fields = getattr(record, "fields", {})
        line = f"{record.getMessage()} {' '.join(f'{key}={value}' for key, value in fields.items())}"
        who = record.name.removeprefix(f"{log.ROOT}.")
        self._world.tell(who, f"[{record.levelname.lower()}] {line}")
        if record.levelno >= logging.ERROR:
            cause = f": {record.exc_info[1]!r}" if record.exc_info else ""
            self._world.violated(f"{who} logs an error: {line}{cause}")


@contextmanager
def _logs_of(world: World) -> Iterator[None]:
    logger, handler = logging.getLogger(log.ROOT), _Story(world)
    level, propagates = logger.level, logger.propagate
    logger.addHandler(handler)
    logger.setLevel(logging.INFO if world.tells else logging.ERROR)
    logger.propagate = False
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
        logger.propagate = propagates
