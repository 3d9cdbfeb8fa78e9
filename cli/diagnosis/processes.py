"""Rules about processes and the streams between them: who answers, who fits, which hop is up."""

from __future__ import annotations

from collections.abc import Iterator

from cli.diagnosis.finding import Case, Finding, Severity, in_words
from cli.loop import FLOW, Process
from services.protocol.hello import mismatch
from services.protocol.views import HopView

SILENT_MS = 1500
"""Longer than two heartbeats, shorter than what makes a receiver give a hop up."""

LAG_MS = 2000
"""What comes so much later than it could is felt by callers."""

DOWN_MS = 400
"""A hop that is made again at once is no stall."""

RECEIVERS = {"events": "gateway", "text": "tokenizer", "load": "tokenizer", "tokens": "detokenizer"}
SENDERS = {"events": "tokenizer", "text": "detokenizer", "load": "scheduler", "tokens": "scheduler"}


def unanswered(case: Case) -> Iterator[Finding]:
    """A process that tells nothing of itself."""
    for process in case.now.processes:
        if process.answered or _answered_before(case, process):
            continue
        if process.hangs:
            yield Finding(
                code="PROCESS_HANGS",
                severity=Severity.STUCK,
                link=process.name,
                what=f"{process.name} ({process.address}) takes connections and answers nothing: it is stopped, "
                "swapped out, or its event loop is blocked.",
                advice="look at its state (`ps -o stat,wchan`; T is stopped, kill -CONT wakes it); if it runs, "
                "`py-spy dump` shows where it is; otherwise restart it.",
            )
        else:
            yield Finding(
                code="PROCESS_DOWN",
                severity=Severity.STUCK,
                link=process.name,
                what=f"{process.name} ({process.address}) does not answer: {process.why_not}.",
                advice="start it, or name the right admin address with --admin.",
            )


def misfits(case: Case) -> Iterator[Finding]:
    """Processes that must not work together: another model, vocabulary or protocol."""
    answered = [process for process in case.now.processes if process.hello is not None]
    answered.sort(key=lambda process: FLOW.index(process.service) if process.service in FLOW else len(FLOW))
    informed = [process for process in answered if process.hello is not None and process.hello.model_id]
    for process in answered:
        judge = informed[0] if informed else process
        assert process.hello is not None
        assert judge.hello is not None
        why = mismatch(judge.hello, process.hello)
        if why is not None:
            yield Finding(
                code="MISMATCH",
                severity=Severity.STUCK,
                link=f"{judge.name} ↔ {process.name}",
                what=f"{process.name} ({process.address}) does not fit {judge.name} ({judge.address}): {why}.",
                advice="give all of them the same model directory and neighbouring versions, and restart the odd one.",
            )


def hops(case: Case) -> Iterator[Finding]:
    """A stream between two processes that is down or silent; not the text that can't come because no tokens do."""
    found = [(hop, _hop(process, hop)) for process in case.now.processes for hop in process.view.hops]
    without_tokens = {hop.sender for hop, finding in found if finding is not None and hop.what == "tokens"}
    for hop, finding in found:
        if finding is not None and not (hop.what == "text" and hop.scheduler in without_tokens):
            yield finding


def lagging_hops(case: Case) -> Iterator[Finding]:
    """A stream that moves, and brings what is old."""
    lagged = {
        (process.address, hop.what, hop.sender, hop.scheduler)
        for process in case.before.processes
        for hop in process.view.hops
        if hop.lag_ms >= LAG_MS
    }
    for process in case.now.processes:
        for hop in process.view.hops:
            same = (process.address, hop.what, hop.sender, hop.scheduler)
            if hop.up and hop.lag_ms >= LAG_MS and same in lagged:
                yield Finding(
                    code="HOP_LAGS",
                    severity=Severity.BUSY,
                    link=_link(hop),
                    what=f"{process.name} gets {hop.what} from {SENDERS[hop.what]} {hop.sender} "
                    f"{in_words(hop.lag_ms)} late: more is sent than comes through.",
                    advice="see what the network between the two lets through, and whether one of them lacks CPU "
                    "(tailrace_event_loop_lag_seconds).",
                )


def unready(case: Case) -> Iterator[Finding]:
    """A process that takes no new work."""
    for process in case.now.processes:
        view = process.view
        if not process.answered or view.ready:
            continue
        leaving = view.phase in ("draining", "stopped")
        yield Finding(
            code="DRAINING" if leaving else "NOT_READY",
            severity=Severity.NOTE if leaving else Severity.STUCK,
            link=process.name,
            what=f"{process.name} ({process.address}) takes no new requests: {view.not_ready_why}.",
            advice="it finishes what is open and ends." if leaving else "wait if it is loading; otherwise see its log.",
        )


def strangers(case: Case) -> Iterator[Finding]:
    """A hop to an incarnation that was not asked: the list of addresses is not whole, or one of them is old."""
    for process in case.now.processes:
        for hop in process.view.hops:
            sender = "scheduler" if hop.what == "text" else SENDERS[hop.what]
            epochs = {peer.epoch for peer in case.now.of(sender)}
            if hop.up and hop.hello is not None and epochs and hop.hello.epoch not in epochs:
                yield Finding(
                    code="UNKNOWN_PEER",
                    severity=Severity.NOTE,
                    link=f"{sender} → {process.name}",
                    what=f"{process.name} is connected to a {sender} ({hop.scheduler or hop.sender}) that is none of "
                    "those asked here.",
                    advice="add its admin address with --admin, so that it can be seen too.",
                )


def _answered_before(case: Case, process: Process) -> bool:
    """One answer that came late is no hang: the next look decides."""
    earlier = next((p for p in case.before.processes if p.address == process.address), process)
    return earlier.answered


def _hop(process: Process, hop: HopView) -> Finding | None:
    link = _link(hop)
    sender = f"{SENDERS[hop.what]} {hop.sender}"
    if not hop.up and hop.since_ms >= DOWN_MS:
        return Finding(
            code="HOP_DOWN",
            severity=Severity.STUCK,
            link=link,
            since_ms=hop.since_ms,
            what=f"{process.name} gets no {hop.what} from {sender}: {hop.why_not}.",
            advice="the receiver tries again by itself; see whether that process lives and whether the network between "
            "the two lets the connection through.",
        )
    if hop.up and hop.silent_ms >= SILENT_MS:
        return Finding(
            code="HOP_SILENT",
            severity=Severity.STUCK,
            link=link,
            since_ms=hop.silent_ms,
            what=f"{process.name} has heard nothing from {sender} for {in_words(hop.silent_ms)}, not even a "
            "heartbeat, though the stream is open.",
            advice="the sender hangs, or the network between the two swallows packets; after 2 s the receiver gives "
            "the stream up and tries again.",
        )
    return None


def _link(hop: HopView) -> str:
    return f"{SENDERS[hop.what]} → {RECEIVERS[hop.what]}"
