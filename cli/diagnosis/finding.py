"""What the doctor found: which link, since when, and what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum

from cli.loop import Flow, Snapshot

EXAMPLES = 3
"""Requests that a finding names; the others are counted."""


class Severity(Enum):
    """How bad it is."""

    STUCK = "stuck"
    """Something does not go on, and won't by itself."""
    BUSY = "busy"
    """Requests wait, and what they wait for is at work."""
    NOTE = "note"
    """Right as it is, and worth knowing when somebody asks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that was found. `code` is for programs; `since_ms` None: not known."""

    code: str
    severity: Severity
    link: str
    what: str
    advice: str
    since_ms: int | None = None
    requests: Sequence[str] = ()

    @property
    def since(self) -> str:
        """For how long, in words."""
        return "" if self.since_ms is None else f"for {in_words(self.since_ms)}"

    def explains(self, other: Finding) -> bool:
        """Whether the other one follows from it: it is about the same link, or one that has this link or process in it.

        A hop that is down explains what stands still before a longer way over it.
        """
        ours, theirs = self.link.split(" → "), other.link.split(" → ")
        starts = range(len(theirs) - len(ours) + 1)
        return self.severity is Severity.STUCK and any(theirs[at : at + len(ours)] == ours for at in starts)

    def naming(self, requests: Sequence[str]) -> Finding:
        """The same, with the requests that suffer from it, unless it names some already."""
        return self if self.requests else replace(self, requests=requests)


@dataclass(frozen=True, slots=True)
class Case:
    """Two looks at the loop, a moment apart; only what holds in both counts."""

    before: Snapshot
    now: Snapshot
    flows_before: dict[tuple[str, int, int], Flow]
    flows: dict[tuple[str, int, int], Flow]

    @classmethod
    def of(cls, before: Snapshot, now: Snapshot) -> Case:
        """Joins both."""
        return cls(before, now, before.flows(), now.flows())

    def both(self) -> Iterator[tuple[Flow, Flow]]:
        """Every request that is in both looks: before, and now."""
        for key, flow in self.flows.items():
            earlier = self.flows_before.get(key)
            if earlier is not None:
                yield earlier, flow


Rule = Callable[[Case], Iterator[Finding]]


def in_words(ms: int) -> str:
    """A duration for people."""
    if ms < 1000:
        return f"{ms} ms"
    if ms < 60_000:
        return f"{ms / 1000:.1f} s"
    minutes, seconds = divmod(ms // 1000, 60)
    return f"{minutes} min {seconds} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def count(number: int, noun: str) -> str:
    """1 request, 2 requests; 1 process, 2 processes."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}{'es' if noun.endswith('s') else 's'}"


def named(flows: Sequence[Flow]) -> tuple[str, ...]:
    """The first ones' names."""
    return tuple(flow.name for flow in flows[:EXAMPLES])
