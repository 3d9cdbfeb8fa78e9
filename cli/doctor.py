"""`tailrace doctor`: looks at the whole loop twice and says which link is stuck, since when, and what to do."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from cli.admin_addresses import BadAddresses, Named, add_admin_flag, admin_addresses
from cli.diagnosis import diagnose
from cli.diagnosis.finding import Finding, Severity, count
from cli.exit_code import ExitCode
from cli.loop import Loop, Snapshot

LOOK_S = 0.5
"""Between two looks. A healthy delta is on its way for some milliseconds."""

CONFIRM_S = 1.2
"""What looks stuck is looked at again after so long: a busy machine may have been late."""

MARKS = {Severity.STUCK: "[bold red]✗[/]", Severity.BUSY: "[yellow]●[/]", Severity.NOTE: "[blue]·[/]"}


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What was found, and the two looks that it stands on."""

    findings: Sequence[Finding]
    before: Snapshot
    now: Snapshot

    @property
    def stuck(self) -> bool:
        """Whether something does not go on by itself."""
        return any(finding.severity is Severity.STUCK for finding in self.findings)

    @property
    def reached(self) -> int:
        """Processes that answered."""
        return sum(process.answered for process in self.now.processes)

    @property
    def open_requests(self) -> int:
        """Requests in the tokenizers' ledgers."""
        return sum(process.total for process in self.now.of("tokenizer"))

    @property
    def tokens_per_s(self) -> float:
        """What the schedulers generated between the looks."""
        before = {process.epoch: process.view.output_tokens for process in self.before.of("scheduler")}
        tokens = sum(
            process.view.output_tokens - before.get(process.epoch, process.view.output_tokens)
            for process in self.now.of("scheduler")
        )
        return tokens / max(self.now.at - self.before.at, 1e-9)


def main(argv: Sequence[str]) -> int:
    """Exit code 0: healthy, busy or not; 1: something is stuck; 3: no process answers."""
    options = _parser().parse_args(argv)
    try:
        addresses = admin_addresses(options.admin)
    except BadAddresses as error:
        print(f"tailrace doctor: {error}", file=sys.stderr)
        return ExitCode.USAGE
    diagnosis = asyncio.run(examine(addresses))
    if options.json:
        print(json.dumps(as_json(diagnosis), indent=2, ensure_ascii=False))
    else:
        show(diagnosis, Console(highlight=False))
    if not diagnosis.reached:
        return ExitCode.UNREACHABLE
    return ExitCode.FAILED if diagnosis.stuck else ExitCode.OK


async def examine(addresses: Sequence[Named]) -> Diagnosis:
    """Looks twice, and a third time before it says that something is stuck or lets a late answer pass."""
    async with Loop(addresses) as loop:
        before = await loop.look()
        await asyncio.sleep(LOOK_S)
        now = await loop.look()
        diagnosis = Diagnosis(diagnose(before, now), before, now)
        if not needs_another_look(diagnosis):
            return diagnosis
        await asyncio.sleep(CONFIRM_S)
        last = await loop.look()
        return Diagnosis(diagnose(now, last), now, last)


def needs_another_look(diagnosis: Diagnosis) -> bool:
    """Whether two looks don't settle it: a process fell silent between them, or they were too close for a verdict."""
    before, now = diagnosis.before, diagnosis.now
    if any(was.answered and not process.answered for was, process in zip(before.processes, now.processes, strict=True)):
        return True
    surely = now.at - before.at >= CONFIRM_S  # a process that hangs has made both looks slow
    return diagnosis.stuck and bool(diagnosis.reached) and not surely


def show(diagnosis: Diagnosis, console: Console) -> None:
    """For people."""
    if not diagnosis.reached:
        console.print("[bold red]✗ no process of Tailrace answers[/] at " + _addresses(diagnosis.now))
        console.print("  start one with `tailrace up`, or say where the admin ports are with --admin.")
        return
    stuck = sum(finding.severity is Severity.STUCK for finding in diagnosis.findings)
    if stuck:
        console.print(f"[bold red]✗ {count(stuck, 'link')} of the loop {'is' if stuck == 1 else 'are'} stuck[/]")
    else:
        console.print("[bold green]✓ the loop is healthy[/]")
    console.print(
        f"  {diagnosis.reached} of {count(len(diagnosis.now.processes), 'process')} "
        f"answer, {count(diagnosis.open_requests, 'request')} open, {diagnosis.tokens_per_s:,.0f} tokens/s"
    )
    for finding in diagnosis.findings:
        _show_finding(finding, console)


def as_json(diagnosis: Diagnosis) -> dict[str, object]:
    """For programs."""
    return {
        "healthy": bool(diagnosis.reached) and not diagnosis.stuck,
        "open_requests": diagnosis.open_requests,
        "tokens_per_s": round(diagnosis.tokens_per_s, 1),
        "processes": [
            {
                "name": process.name,
                "service": process.service,
                "address": process.address,
                "answered": process.answered,
                "why_not": process.why_not or process.view.not_ready_why,
                "open": process.total,
            }
            for process in diagnosis.now.processes
        ],
        "findings": [asdict(finding) | {"severity": finding.severity.value} for finding in diagnosis.findings],
    }


def _show_finding(finding: Finding, console: Console) -> None:
    console.print()
    console.print(f"{MARKS[finding.severity]} [bold]{escape(finding.link)}[/]  {finding.since}  [dim]{finding.code}[/]")
    console.print(Padding(escape(finding.what), (0, 0, 0, 2)))
    if finding.advice:
        advice = Table.grid(padding=(0, 1))
        advice.add_row(" [dim]→[/]", escape(finding.advice))
        console.print(advice)
    if finding.requests:
        console.print(f"  [dim]requests:[/] {escape(', '.join(finding.requests))}")


def _addresses(snapshot: Snapshot) -> str:
    return ", ".join(process.address for process in snapshot.processes)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tailrace doctor",
        description="Looks at all processes and says which link of the loop is stuck. "
        "Exit codes: 0 healthy, 1 something is stuck, 2 usage, 3 no process answers.",
    )
    add_admin_flag(parser)
    parser.add_argument("--json", action="store_true", help="for programs")
    return parser
