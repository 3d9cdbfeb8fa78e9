"""`tailrace trace REQUEST`: one request's life over all services, while it lives and for a while afterwards."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from rich.console import Console, Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from cli.admin_addresses import BadAddresses, Named, add_admin_flag, admin_addresses
from cli.diagnosis.finding import in_words
from cli.diagnosis.path import places
from cli.exit_code import ExitCode
from cli.loop import FLOW, Flow, Loop, Snapshot
from cli.timeline import Span, spans_of

BAR_WIDTH = 44
COLOURS = {"gateway": "cyan", "tokenizer": "magenta", "detokenizer": "blue", "scheduler": "yellow"}


def main(argv: Sequence[str]) -> int:
    """Exit code 0: found; 1: no process knows it; 3: no process answers."""
    options = _parser().parse_args(argv)
    try:
        snapshot = asyncio.run(_find(admin_addresses(options.admin), options.request))
    except BadAddresses as error:
        print(f"tailrace trace: {error}", file=sys.stderr)
        return ExitCode.USAGE
    flows = [flow for flow in snapshot.flows().values() if flow.name == options.request]
    if not any(process.answered for process in snapshot.processes):
        print("tailrace trace: no process of Tailrace answers; see `tailrace doctor`", file=sys.stderr)
        return ExitCode.UNREACHABLE
    if not flows:
        print(f"tailrace trace: nobody knows {options.request}, or it ended too long ago", file=sys.stderr)
        return ExitCode.FAILED
    if options.json:
        print(json.dumps([as_json(flow) for flow in flows], indent=2, ensure_ascii=False))
    else:
        console = Console(highlight=False)
        for flow in flows:
            console.print(picture(flow))
    return ExitCode.OK


def picture(flow: Flow) -> RenderableType:
    """For people: what it is, its spans as bars, and where its choices stand."""
    return Group(Text.from_markup(_headline(flow)), "", _bars(spans_of(flow)), "", *_positions(flow))


def as_json(flow: Flow) -> dict[str, object]:
    """For programs."""
    return {
        "request_id": flow.name,
        "views": {name: _plain(asdict(view)) for name in FLOW if (view := getattr(flow, name)) is not None},
        "spans": [asdict(span) for span in spans_of(flow)],
    }


def _plain(value: object) -> object:
    """Named tuples with their names."""
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: _plain(part) for name, part in value._asdict().items()}
    if isinstance(value, dict):
        return {name: _plain(part) for name, part in value.items()}
    return [_plain(part) for part in value] if isinstance(value, list | tuple) else value


async def _find(addresses: Sequence[Named], request_id: str) -> Snapshot:
    async with Loop(addresses) as loop:
        return await loop.find(request_id)


def _headline(flow: Flow) -> str:
    view = flow.tokenizer or flow.scheduler or flow.gateway
    assert view is not None
    facts = [f"[bold]{escape(flow.name)}[/]"]
    facts += [f"tenant {escape(view.tenant)}"] if view.tenant else []
    facts += [f"{view.prompt_tokens} prompt tokens"]
    facts += [f"attempt {view.attempt_id:x}"] if view.attempt_id else []
    facts += [f"attempt number {view.attempts}"] if view.attempts > 1 else []
    if flow.scheduler is not None and flow.scheduler.route is not None:
        facts += [f"fence {flow.scheduler.fence}", f"generation {flow.scheduler.route.generation} of its route"]
    phases = [f"{name} {phase}" for name, phase in _phases(flow)]
    if view.deadline_in_ms is not None and not view.ended:
        phases.append(f"deadline in {in_words(max(view.deadline_in_ms, 0))}")
    return " · ".join(facts) + "\n[dim]" + escape(" · ".join(phases)) + "[/]"


def _phases(flow: Flow) -> Iterator[tuple[str, str]]:
    if flow.gateway is not None:
        yield "gateway", flow.gateway.caller_phase
    if flow.tokenizer is not None:
        yield "caller", flow.tokenizer.caller_phase
        yield "engine", flow.tokenizer.engine_phase
    if flow.scheduler is not None:
        yield "scheduler", flow.scheduler.engine_phase


def _bars(spans: Sequence[Span]) -> Table:
    table = Table(box=None, pad_edge=False, show_header=False)
    if not spans:
        return table
    start_us = min(span.start_us for span in spans)
    whole_us = max(max(span.end_us for span in spans) - start_us, 1)
    for index, span in enumerate(spans):
        first = index == 0 or spans[index - 1].service != span.service
        at = round((span.start_us - start_us) / whole_us * BAR_WIDTH)
        length = max(round((span.end_us - span.start_us) / whole_us * BAR_WIDTH), 1)
        at = min(at, BAR_WIDTH - length)
        bar = Text(" " * at) + Text("━" * length + ("╸…" if span.open_ else ""), style=COLOURS[span.service])
        table.add_row(
            Text(span.service if first else "", style=f"bold {COLOURS[span.service]}"),
            span.name,
            bar,
            Text(f"+{_ms(span.start_us - start_us)}", style="dim", justify="right"),
            Text(_ms(span.end_us - span.start_us) + (" so far" if span.open_ else ""), justify="right"),
        )
    return table


def _positions(flow: Flow) -> Iterator[RenderableType]:
    view = flow.tokenizer or flow.scheduler
    if view is None:
        return
    table = Table(box=None, pad_edge=False, header_style="dim")
    rows = [(choice, places(flow, choice.choice)) for choice in view.choices]
    headings = dict.fromkeys(place.where for _, found in rows for place in found)
    for heading in ("choice", *headings, "end"):
        table.add_column(heading, justify="right")
    for choice, found in rows:
        tokens = {place.where: str(place.tokens) for place in found}
        table.add_row(str(choice.choice), *(tokens.get(heading, "") for heading in headings), choice.finish_reason)
    yield Text("tokens, from the engine outwards", style="dim")
    yield table


def _ms(us: int) -> str:
    return f"{us / 1000:.1f} ms" if us < 1_000_000 else f"{us / 1_000_000:.2f} s"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tailrace trace",
        description="Shows one request's life over all services. Those that ended are kept for a while. "
        "Exit codes: 0 found, 1 not found, 2 usage, 3 no process answers.",
    )
    parser.add_argument("request", metavar="REQUEST", help="the request's id")
    add_admin_flag(parser)
    parser.add_argument("--json", action="store_true", help="for programs")
    return parser
