"""Rules about what is owed: an answer to Submit, a release, an attempt that only one side knows."""

from __future__ import annotations

from collections.abc import Iterator

from cli.diagnosis.finding import Case, Finding, Severity, count, named
from cli.loop import Flow

OWED_MS = 2000


def unreleased(case: Case) -> Iterator[Finding]:
    """Requests whose callers have their end, and which are still remembered."""
    missing: dict[str, list[Flow]] = {}
    for before, now in case.both():
        view = now.tokenizer
        if view is None or before.tokenizer is None or view.caller_phase not in ("FINISHED", "GONE"):
            continue
        if view.waits_for == "CLAIMER":
            continue  # for ten seconds at most
        if before.tokenizer.caller_phase == view.caller_phase and (view.finished_ms or 0) >= OWED_MS:
            missing.setdefault(view.waits_for, []).append(now)
    for waits_for, flows in missing.items():
        yield _unreleased(waits_for, flows, moves=waits_for == "MARKER" and _moves(case, flows[0]))


def submitting(case: Case) -> Iterator[Finding]:
    """Submits that no scheduler has answered."""
    flows = [
        now
        for before, now in case.both()
        if now.tokenizer is not None
        and now.tokenizer.engine_phase == "SUBMITTING"
        and now.tokenizer.age_ms >= OWED_MS
        and before.tokenizer is not None
        and before.tokenizer.engine_phase == "SUBMITTING"
    ]
    if flows:
        yield Finding(
            code="SUBMIT_UNANSWERED",
            severity=Severity.STUCK,
            link="tokenizer → scheduler",
            since_ms=max(flow.tokenizer.age_ms for flow in flows if flow.tokenizer is not None),
            what=f"{count(len(flows), 'request')}: Submit was sent and the scheduler does not answer it.",
            advice="see whether the scheduler lives and can be reached from the tokenizer; Submit is repeated until "
            "submit_timeout_s, then the caller is refused.",
            requests=named(flows),
        )


def stranded(case: Case) -> Iterator[Finding]:
    """Requests whose scheduler died and that wait for another one."""
    flows = [
        now
        for before, now in case.both()
        if now.tokenizer is not None and now.tokenizer.waits_for == "SCHEDULER"
        and before.tokenizer is not None and before.tokenizer.waits_for == "SCHEDULER"
    ]  # fmt: skip
    if flows:
        yield Finding(
            code="NO_SCHEDULER",
            severity=Severity.STUCK,
            link="tokenizer → scheduler",
            since_ms=max(flow.tokenizer.idle_ms for flow in flows if flow.tokenizer is not None),
            what=f"{count(len(flows), 'request')} lost the scheduler that ran them and wait for one to go on with.",
            advice="start a scheduler; they go on where they stood, and end with an error after engine_grace_s.",
            requests=named(flows),
        )


def orphans(case: Case) -> Iterator[Finding]:
    """Attempts in a scheduler that their tokenizer does not know."""
    flows = [now for before, now in case.both() if _orphan(case, before) and _orphan(case, now)]
    if flows:
        yield Finding(
            code="ATTEMPT_ORPHANED",
            severity=Severity.STUCK,
            link="scheduler → tokenizer",
            since_ms=max(flow.scheduler.age_ms for flow in flows if flow.scheduler is not None),
            what=f"{count(len(flows), 'attempt')} in a scheduler belong to a tokenizer that is gone or does not know "
            "them.",
            advice="they are released when the lease is over (lease_grace_s); nothing has to be done.",
            requests=named(flows),
        )


def unreleased_streams(case: Case) -> Iterator[Finding]:
    """Streams that the gateway has closed, of which the tokenizer was not told."""
    gateways = {process.epoch: process for process in case.now.of("gateway") if process.listed_all}
    flows = [
        now
        for before, now in case.both()
        if now.tokenizer is not None and now.tokenizer.caller_phase == "OPEN" and now.tokenizer.readers
        and before.tokenizer is not None and before.tokenizer.readers
        and now.gateway is None and before.gateway is None
        and now.tokenizer.engine_phase != "SUBMITTING" and now.tokenizer.age_ms >= OWED_MS
        and all(reader.gateway_epoch in gateways for reader in now.tokenizer.readers)
    ]  # fmt: skip
    if flows:
        yield Finding(
            code="STREAM_RELEASE_OWED",
            severity=Severity.STUCK,
            link="gateway → tokenizer",
            since_ms=None,
            what=f"{count(len(flows), 'request')}: the gateway has closed the caller's stream and the tokenizer has "
            "not heard of it.",
            advice="see whether the gateway can reach the tokenizer; it tells it again until it is answered.",
            requests=named(flows),
        )


def _unreleased(waits_for: str, flows: list[Flow], *, moves: bool) -> Finding:
    link, what, advice = {
        "RELEASE_ANSWER": (
            "tokenizer → scheduler",
            "the scheduler has not answered Release",
            "see whether the scheduler lives and can be reached from the tokenizer; Release is repeated until then.",
        ),
        "MARKER": (
            "scheduler → detokenizer → tokenizer",
            "Release was answered, and the marker that nothing follows has not come through the route",
            "see the detokenizer and the route; after 10 s the marker is done without.",
        ),
    }.get(
        waits_for,
        ("tokenizer", "nothing says why", "this is a bug: keep the tokenizer's log and the output of --json."),
    )
    ends = [flow.tokenizer.finished_ms or 0 for flow in flows if flow.tokenizer is not None]
    return Finding(
        code=f"UNRELEASED_{waits_for or 'UNKNOWN'}",
        severity=Severity.BUSY if moves else Severity.STUCK,
        link=link,
        since_ms=max(ends),
        what=f"{count(len(flows), 'request')}: the caller has its end, and the request is still remembered: {what}.",
        advice=advice,
        requests=named(flows),
    )


def _moves(case: Case, flow: Flow) -> bool:
    """Whether text comes: then the marker is behind it, and only late."""
    tokenizer = flow.at["tokenizer"]
    before = next((p.view for p in case.before.of("tokenizer") if p.epoch == tokenizer.epoch), tokenizer.view)
    return tokenizer.view.output_tokens > before.output_tokens


def _orphan(case: Case, flow: Flow) -> bool:
    view, tokenizers = flow.scheduler, case.now.of("tokenizer")
    if view is None or flow.tokenizer is not None or view.route is None or view.age_ms < OWED_MS:
        return False
    owner = next((t for t in tokenizers if t.epoch == view.route.tokenizer_epoch), None)
    if owner is not None:
        return owner.listed_all
    # The owner may be one that was not asked; a hop to us from it would say so.
    return any(t.view.name == view.route.tokenizer for t in tokenizers)
