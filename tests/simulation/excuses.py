"""Whether a caller's fate has a reason in the plan: an end that nobody caused is a broken promise too."""

from __future__ import annotations

from collections.abc import Sequence

from services.protocol.events import ErrorCode, Finish, FinishReason
from tests.simulation.caller import Caller
from tests.simulation.plan import Plan
from tests.simulation.request import Behaviour

DEADLINE_SLACK_S = 0.5
"""We end a little before a call's own deadline."""


STRIKES = ("kill", "kill silently", "misfit", "pause", "drain")


def unexcused(caller: Caller, callers: Sequence[Caller], plan: Plan) -> str:
    """What happened to one of the callers without a cause; empty when all is well."""
    outcome, behaviour = caller.outcome, caller.behaviour
    assert outcome is not None
    for finish in caller.answer.finishes:
        if why := _unexcused_finish(finish, caller, callers, plan):
            return why
    shown = f"{outcome.kind} with {outcome.code} {outcome.message!r}"
    match outcome.kind:
        case "refused":
            return "" if _may_be_refused(outcome.code, behaviour, plan) else f"{shown}, for no reason"
        case "cut":
            excused = behaviour.deadline_s or behaviour.stops_reading_for or _may_be_cut(behaviour.door, plan)
            return "" if excused else f"{shown}, for no reason"
        case "lost":
            return "" if _may_be_lost(outcome.code, behaviour, plan) else f"{shown}, for no reason"
        case _:
            return ""


def _unexcused_finish(finish: Finish, caller: Caller, callers: Sequence[Caller], plan: Plan) -> str:
    request = caller.behaviour.request
    match finish.reason:
        case FinishReason.STOP | FinishReason.LENGTH:
            return ""
        case FinishReason.ABORTED:
            excused = _aborted(caller, callers) or _happened(plan, "drain")
            return "" if excused else "ABORTED, and nobody aborted it"
        case FinishReason.DEADLINE:
            limits = [limit for limit in (request.timeout_s, caller.behaviour.deadline_s) if limit]
            took_s = caller.ended_at - caller.asked_at
            # Who asks under a label may have come to a request that was asked before.
            early = not limits or (not request.request_id and took_s < min(limits) / 2 - DEADLINE_SLACK_S)
            return f"DEADLINE after {took_s:.2f} s" if early else ""
        case FinishReason.ERROR:
            assert finish.error is not None
            excused = finish.error.code is ErrorCode.ENGINE_LOST and bool(_hit(plan, "scheduler") or _weather(plan))
            return "" if excused else f"{finish.error}, for no reason"


def _may_be_refused(code: str, behaviour: Behaviour, plan: Plan) -> bool:
    labelled = bool(behaviour.request.request_id)
    match code:
        case "UNAVAILABLE" | "CANCELLED":
            return bool(plan.faults)
        case "RESOURCE_EXHAUSTED":
            return plan.shape.max_waiting < 8 or plan.shape.max_open < 8
        case "INVALID_ARGUMENT":
            return behaviour.request.n > plan.shape.max_running + plan.shape.max_waiting
        case "ALREADY_EXISTS":
            return labelled
        case "ABORTED":
            return labelled or behaviour.aborts_after is not None
        case "DEADLINE_EXCEEDED":
            return bool(plan.faults or behaviour.deadline_s or behaviour.request.timeout_s)
        case _:
            return False


def _may_be_cut(door: str, plan: Plan) -> bool:
    """A stream outlives everything but its door, the way there, and all who know of it."""
    service, doorkeeper = door.partition("-")[0], door.partition(":")[0]
    if doorkeeper in _hit(plan, service) or _weather(plan):
        return True
    lost = len(_hit(plan, "tokenizer"))
    return service == "gateway" and (lost == plan.shape.tokenizers or bool(lost and _hit(plan, "scheduler")))


def _hit(plan: Plan, service: str) -> set[str]:
    """Which processes of a service were killed, paused or drained."""
    hit = {fault.process for fault in plan.faults if fault.kind in STRIKES}
    return {process for process in hit if process.startswith(service)}


def _weather(plan: Plan) -> bool:
    """Whether the network had any trouble."""
    return any(fault.kind not in STRIKES for fault in plan.faults)


def _may_be_lost(code: str, behaviour: Behaviour, plan: Plan) -> bool:
    if code == "UNIMPLEMENTED":
        return behaviour.door.startswith("gateway")
    return bool(plan.faults or code == "NOT_FOUND")


def _aborted(caller: Caller, callers: Sequence[Caller]) -> bool:
    """Whether somebody had its label aborted while it was open; an abort without an answer may come at any time."""
    started = caller.answer.started
    label = caller.behaviour.request.request_id or (started.request_id if started else "")
    aborts = [other.aborted for other in callers if other.aborted is not None]
    return any(
        aborted == label and sent_at <= caller.ended_at and caller.asked_at <= answered_at
        for aborted, sent_at, answered_at in aborts
    )


def _happened(plan: Plan, kind: str) -> bool:
    return any(fault.kind == kind for fault in plan.faults)
