"""Prints docs/lifecycles.md: the transition tables of all services as diagrams. `make reference` writes it."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from typing import Any

from gateway.state import LINK_TRANSITIONS, STREAM_TRANSITIONS
from services.detokenizer.state import TRANSITIONS as DETOKENIZER_TRANSITIONS
from services.runtime.phase import TRANSITIONS as PHASE_TRANSITIONS
from services.scheduler.state import ATTEMPT_TRANSITIONS, LEASE_TRANSITIONS, SEQUENCE_TRANSITIONS
from services.tokenizer.state import CALLER_TRANSITIONS, ENGINE_TRANSITIONS

HEAD = """# Lifecycles

Where a thing can stand, and what moves it on: drawn by `make reference` from the tables in each service's `state.py`.
A pair that isn't in a table raises, so these pictures are all there is. `tailrace trace` and `tailrace doctor` use the
same words.
"""

TABLES: dict[str, Mapping[tuple[Any, Any], Any]] = {
    "A process": PHASE_TRANSITIONS,
    "A caller's stream, in the gateway": STREAM_TRANSITIONS,
    "The gateway's link to a tokenizer": LINK_TRANSITIONS,
    "A request's caller side, in the tokenizer": CALLER_TRANSITIONS,
    "A request's engine side: an attempt, in the tokenizer": ENGINE_TRANSITIONS,
    "A sequence in the detokenizer": DETOKENIZER_TRANSITIONS,
    "A sequence in the scheduler": SEQUENCE_TRANSITIONS,
    "An attempt in the scheduler": ATTEMPT_TRANSITIONS,
    "A tokenizer's lease, in the scheduler": LEASE_TRANSITIONS,
}


def document() -> str:
    """The whole document."""
    return HEAD + "".join(_section(title, table) for title, table in TABLES.items())


def _section(title: str, table: Mapping[tuple[Enum, Enum], Enum]) -> str:
    edges: dict[tuple[str, str], list[str]] = {}
    for (phase, event), after in table.items():
        edges.setdefault((phase.name, after.name), []).append(event.name)
    first = next(iter(table))[0].name
    lines = [f"    [*] --> {first}"]
    lines += [f"    {start} --> {end}: {', '.join(events)}" for (start, end), events in edges.items()]
    starts = {start for start, _ in edges}
    lines += [f"    {end} --> [*]" for end in dict.fromkeys(end for _, end in edges) if end not in starts]
    body = "\n".join(lines)
    return f"\n## {title}\n\n```mermaid\nstateDiagram-v2\n{body}\n```\n"


if __name__ == "__main__":
    print(document(), end="")
