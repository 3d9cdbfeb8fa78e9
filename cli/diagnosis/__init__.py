"""Says in plain words which link of the loop is stuck: pure rules over two looks at all processes."""

from __future__ import annotations

from collections.abc import Sequence

from cli.diagnosis import engine, path, processes, release
from cli.diagnosis.finding import Case, Finding, Rule, Severity
from cli.loop import Snapshot

RULES: Sequence[Rule] = (
    processes.unanswered,
    processes.misfits,
    processes.hops,
    engine.steps,
    release.stranded,
    release.submitting,
    path.stuck_links,
    processes.lagging_hops,
    release.unreleased,
    release.unreleased_streams,
    release.orphans,
    engine.queue,
    processes.strangers,
)
"""Causes before what follows from them."""


def diagnose(before: Snapshot, now: Snapshot) -> list[Finding]:
    """What holds in both looks, causes first; of a link that is stuck, or ends at a process that is, nothing more.

    That a process is not ready is told only where nothing else explains it.
    """
    case = Case.of(before, now)
    findings: list[Finding] = []
    for rule in RULES:
        causes = len(findings)
        for finding in rule(case):
            cause = next((at for at in range(causes) if findings[at].explains(finding)), None)
            if cause is None:
                findings.append(finding)
            else:
                findings[cause] = findings[cause].naming(finding.requests)
    if not any(finding.severity is Severity.STUCK for finding in findings):
        findings += processes.unready(case)
    return sorted(findings, key=lambda finding: list(Severity).index(finding.severity))
