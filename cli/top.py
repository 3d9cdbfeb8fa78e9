"""`tailrace top`: the whole loop, live: what is open where, how fast it moves, and who waits longest."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.markup import escape
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from cli.admin_addresses import BadAddresses, Named, add_admin_flag, admin_addresses
from cli.diagnosis.finding import in_words
from cli.diagnosis.path import LINKS, places
from cli.exit_code import ExitCode
from cli.loop import Flow, Loop, Process, Snapshot

FIRST_LOOK_S = 0.5
SHOWN = 10
ASKED = 100
"""Requests asked for, the oldest: what looking costs must not grow with what is open."""

ARRIVALS = {"tokens": "received", "text": "merged", "events": "at the gateway"}
"""Where what a hop carries arrives."""

PHASES = ("SUBMITTING", "WAITING", "PREFILL", "DECODE", "ENDED", "RELEASING")


def main(argv: Sequence[str]) -> int:
    """Runs until Ctrl-C; with --once prints one picture. Exit code 3 when no process answers."""
    options = _parser().parse_args(argv)
    try:
        addresses = admin_addresses(options.admin)
    except BadAddresses as error:
        print(f"tailrace top: {error}", file=sys.stderr)
        return ExitCode.USAGE
    return asyncio.run(_top(addresses, options.interval_s, once=options.once))


async def _top(addresses: Sequence[Named], interval_s: float, *, once: bool) -> int:
    async with Loop(addresses) as loop:
        before = await loop.look(ASKED)
        if not any(process.answered for process in before.processes):
            print("tailrace top: no process of Tailrace answers; see `tailrace doctor`", file=sys.stderr)
            return ExitCode.UNREACHABLE
        await asyncio.sleep(min(FIRST_LOOK_S, interval_s))
        now = await loop.look(ASKED)
        if once:
            Console(highlight=False).print(picture(before, now))
            return ExitCode.OK
        with Live(picture(before, now), screen=True, auto_refresh=False) as live:
            while True:
                await asyncio.sleep(interval_s)
                before, now = now, await loop.look(ASKED)
                live.update(picture(before, now), refresh=True)


def picture(before: Snapshot, now: Snapshot) -> RenderableType:
    """One picture of the loop; rates are those between the two looks."""
    flows = list(now.flows().values())
    return Group(
        _processes(before, now),
        _framed(f"requests by phase{_part(now)}", _phases(flows)),
        _framed("KV blocks", _memory(now)),
        _framed(f"tokens on their way{_part(now)}", _lags(now, flows)),
        _framed("oldest requests", _oldest(flows)),
    )


def _part(now: Snapshot) -> str:
    """Says so where not everything was asked for."""
    return "" if all(p.listed_all for p in now.processes if p.answered) else f", of the {ASKED} oldest"


def _framed(title: str, content: RenderableType) -> Panel:
    return Panel(content, title=title, title_align="left", border_style="dim")


def _processes(before: Snapshot, now: Snapshot) -> Table:
    earlier = {process.epoch: process.view.output_tokens for process in before.processes if process.answered}
    elapsed_s = max(now.at - before.at, 1e-9)
    table = Table(box=None, header_style="dim", pad_edge=False)
    for heading in ("process", "up", "open", "tokens/s", "state", "streams from"):
        number = heading in ("up", "open", "tokens/s")
        table.add_column(heading, justify="right" if number else "left", no_wrap=heading != "streams from")
    for process in now.processes:
        if not process.answered:
            table.add_row(escape(process.name), "", "", "", f"[bold red]{escape(process.why_not)}[/]", "")
            continue
        tokens = process.view.output_tokens - earlier.get(process.epoch, process.view.output_tokens)
        table.add_row(
            escape(process.name),
            in_words(process.view.uptime_ms),
            f"{process.total:,}",
            f"{tokens / elapsed_s:,.0f}",
            "[green]ready[/]" if process.view.ready else "[red]not ready[/]",
            _hops(process),
        )
    return table


def _hops(process: Process) -> Text:
    text = Text()
    for hop in process.view.hops:
        style = "green" if hop.up and hop.silent_ms < 1500 else "bold red"
        text.append(f"{'●' if hop.up else '○'} {hop.what} ", style=style)
        text.append(f"{hop.sender} ", style="dim")
    return text


def _phases(flows: Sequence[Flow]) -> RenderableType:
    engine = Counter(_engine_phase(flow) for flow in flows)
    caller = Counter(flow.tokenizer.caller_phase for flow in flows if flow.tokenizer is not None)
    table = Table.grid(padding=(0, 2))
    table.add_row("[dim]engine[/]", *(f"{phase.lower()} [bold]{engine[phase]:,}[/]" for phase in PHASES))
    table.add_row(
        "[dim]caller[/]", *(f"{phase.lower()} [bold]{number:,}[/]" for phase, number in sorted(caller.items()))
    )
    return table


def _engine_phase(flow: Flow) -> str:
    """The scheduler's word where it has the request, otherwise the tokenizer's."""
    if flow.scheduler is not None:
        return flow.scheduler.engine_phase
    return flow.tokenizer.engine_phase if flow.tokenizer is not None else ""


def _memory(now: Snapshot) -> RenderableType:
    table = Table.grid(padding=(0, 2))
    for process in now.of("scheduler"):
        view = process.view.scheduler
        if view is None:
            continue
        used = view.total_blocks - view.free_blocks - view.cached_blocks
        step = "between steps" if view.step_ms is None else f"step {in_words(view.step_ms)}"
        table.add_row(
            escape(process.name),
            ProgressBar(total=max(view.total_blocks, 1), completed=used, width=20),
            f"{used:,} used · {view.cached_blocks:,} cached · {view.free_blocks:,} free",
            f"batch {view.running} of {view.running_max} · {view.waiting} waiting · {step}",
        )
    return table


def _lags(now: Snapshot, flows: Sequence[Flow]) -> RenderableType:
    """Between each two neighbouring places: tokens, summed over all requests, and how late what comes there is."""
    tokens: Counter[str] = Counter()
    for flow in flows:
        view = flow.tokenizer or flow.scheduler
        for choice in view.choices if view is not None else ():
            for earlier, later in pairwise(places(flow, choice.choice)):
                tokens[f"{earlier.where} → {later.where}"] += max(earlier.tokens - later.tokens, 0)
    if not tokens:
        return Text("nothing is open", style="dim")
    late_ms = _late_ms(now, flows)
    table = Table(box=None, header_style="dim", pad_edge=False)
    for heading in ("from → to", "tokens", "late"):
        table.add_column(heading, justify="left" if heading == "from → to" else "right", min_width=8)
    for start, end in LINKS:
        link = f"{start} → {end}"
        if link in tokens:
            late = f"{late_ms[end]:,} ms" if end in late_ms else ""
            table.add_row(link, f"[bold]{tokens[link]:,}[/]", late)
    return table


def _late_ms(now: Snapshot, flows: Sequence[Flow]) -> dict[str, int]:
    """By the place where something arrives, how late it does: of the hop, or the caller, that lags most."""
    late: dict[str, int] = {}
    for process in now.processes:
        for hop in process.view.hops:
            if hop.what in ARRIVALS:
                late[ARRIVALS[hop.what]] = max(late.get(ARRIVALS[hop.what], 0), hop.lag_ms)
    waits = [flow.gateway.idle_ms for flow in flows if flow.gateway is not None]
    return {**late, "taken by the caller": max(waits)} if waits else late


def _oldest(flows: Sequence[Flow]) -> RenderableType:
    known = [(flow, flow.tokenizer) for flow in flows if flow.tokenizer is not None]
    known.sort(key=lambda pair: -pair[1].age_ms)
    table = Table(box=None, header_style="dim", pad_edge=False)
    for heading in ("request", "age", "idle", "caller", "engine", "tokens", "waits for"):
        table.add_column(heading, justify="right" if heading in ("age", "idle", "tokens") else "left")
    for flow, view in known[:SHOWN]:
        waits = view.waits_for or (flow.scheduler.waits_for if flow.scheduler is not None else "")
        table.add_row(
            escape(flow.name),
            in_words(view.age_ms),
            in_words(view.idle_ms),
            view.caller_phase,
            _engine_phase(flow),
            f"{sum(choice.log_token_offset for choice in view.choices):,}",
            waits.lower(),
        )
    return table


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tailrace top", description="Shows the whole loop, live, until Ctrl-C.")
    add_admin_flag(parser)
    parser.add_argument("--once", action="store_true", help="print one picture and leave")
    parser.add_argument("--interval-s", type=float, default=1.0, metavar="SECONDS", help="between looks (default: 1)")
    return parser
