"""Rules about the scheduler: does it step, and what does its queue wait for."""

from __future__ import annotations

from collections.abc import Iterator

from cli.diagnosis.finding import Case, Finding, Severity, count, in_words, named
from cli.loop import Flow, Process
from services.protocol.views import SchedulerView

LONG_STEP_MS = 5000
QUEUED_MS = 2000


def steps(case: Case) -> Iterator[Finding]:
    """A step that does not end."""
    for process in case.now.of("scheduler"):
        view = process.view.scheduler
        if view is None:
            continue
        if view.step_ms is not None and (view.stalled or view.step_ms >= LONG_STEP_MS):
            yield _long_step(process, view, view.step_ms)


def queue(case: Case) -> Iterator[Finding]:
    """Requests that wait for the engine, and for what."""
    waiting: dict[str, list[Flow]] = {}
    for before, now in case.both():
        view = now.scheduler
        if view is None or before.scheduler is None or view.engine_phase != "WAITING" or view.idle_ms < QUEUED_MS:
            continue
        if before.scheduler.engine_phase == "WAITING":
            waiting.setdefault(now.at["scheduler"].address, []).append(now)
    for flows in waiting.values():
        yield _queued(flows)


def _queued(flows: list[Flow]) -> Finding:
    process = flows[0].at["scheduler"]
    view = process.view.scheduler or SchedulerView()
    first = max(flows, key=lambda flow: flow.scheduler.idle_ms if flow.scheduler is not None else 0)
    assert first.scheduler is not None
    held = view.total_blocks - view.free_blocks - view.cached_blocks
    reason, advice = {
        "BLOCKS": (
            f"for KV blocks: {count(view.running, 'running sequence')} hold {held} of {view.total_blocks}",
            "more KV memory (--kv-tokens, --kv-memory-bytes), shorter outputs, or another scheduler.",
        ),
        "BATCH": (
            f"for a place in the batch: {view.running} of {view.running_max} are taken",
            "raise --max-running if memory allows it, or add a scheduler.",
        ),
    }.get(
        first.scheduler.waits_for,
        ("for their turn: earlier ones are prefilled first", "raise --max-step-tokens, or add a scheduler."),
    )
    wait = "waits" if len(flows) == 1 else "wait"
    return Finding(
        code=f"QUEUED_{first.scheduler.waits_for or 'TURN'}",
        severity=Severity.BUSY,
        link=f"queue of {process.name}",
        since_ms=first.scheduler.idle_ms,
        what=f"{count(len(flows), 'request')} {wait} in {process.name}'s queue {reason}.",
        advice=advice,
        requests=named(flows),
    )


def _long_step(process: Process, view: SchedulerView, step_ms: int) -> Finding:
    return Finding(
        code="STEP_STALLED" if view.stalled else "LONG_STEP",
        severity=Severity.STUCK if view.stalled else Severity.BUSY,
        link=process.name,
        since_ms=step_ms,
        what=f"{process.name}'s running step has taken {in_words(step_ms)}"
        + (", far more than its size explains." if view.stalled else "."),
        advice="the engine hangs: `py-spy dump` and the device's state say where; then restart it."
        if view.stalled
        else "a large prefill on a slow machine takes that long; lower --max-step-tokens for shorter steps.",
    )
