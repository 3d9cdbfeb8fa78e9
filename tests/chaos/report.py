"""What chaos found, as a table for people and as build/chaos/report.json for everything else."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from bench.machine import machine
from tests.chaos.callers import Answer
from tests.chaos.comparison import Verdict
from tests.chaos.fault import Fault, Kind
from tests.chaos.faults import pauses

NOTICEABLE_S = 0.25
"""A shorter silence is no pause: a busy machine makes such gaps by itself."""


@dataclass
class Report:
    """Grows round by round."""

    services: Sequence[str]
    streams: int = 0
    completed: int = 0
    identical: int = 0
    near_ties: int = 0
    drawn_otherwise: int = 0
    problems: list[str] = field(default_factory=list)
    left_behind: Mapping[str, int] = field(default_factory=dict)
    _silences: dict[tuple[str, Kind], list[float]] = field(default_factory=dict)
    _blows: dict[tuple[str, Kind], int] = field(default_factory=dict)

    def add(self, answers: Sequence[Answer], faults: Sequence[Fault], verdict: Verdict) -> None:
        """One round."""
        self.streams += len(answers)
        self.completed += sum(answer.whole for answer in answers)
        self.identical += verdict.identical
        self.near_ties += verdict.near_ties
        self.drawn_otherwise += verdict.drawn_otherwise
        self.problems += [
            f"stream {answer.question.number} ({answer.question.transport}): {_problem(answer)}"
            for answer in answers
            if not answer.whole
        ]
        self.problems += [f"stream {number}: other bytes than undisturbed" for number in verdict.wrong]
        for fault, heard in pauses(faults, answers):
            key = (fault.service, fault.kind)
            self._blows[key] = self._blows.get(key, 0) + 1
            self._silences.setdefault(key, []).extend(heard)

    @property
    def clean(self) -> bool:
        """Whether nothing was lost, changed or left behind."""
        return self.completed == self.streams and not self.problems and not any(self.left_behind.values())

    def write(self, path: Path) -> None:
        """As JSON."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self._as_json(), indent=2) + "\n")

    def _as_json(self) -> dict[str, Any]:
        return {
            "streams": self.streams,
            "completed": self.completed,
            "identical": self.identical,
            "near_ties": self.near_ties,
            "drawn_otherwise": self.drawn_otherwise,
            "kills": {name: self._blows.get((name, Kind.KILL), 0) for name in self.services},
            "stops": {name: self._blows.get((name, Kind.STOP), 0) for name in self.services},
            "pause_s": {name: self._pauses(name, Kind.KILL) for name in self.services},
            "stop_pause_s": {name: self._pauses(name, Kind.STOP) for name in self.services},
            "left_behind": dict(self.left_behind),
            "problems": self.problems,
            "machine": machine(),
        }

    def print(self, console: Console) -> None:
        """As a table and a verdict."""
        table = Table("service", "struck by", "times", "paused", "p50 s", "p99 s", "max s", "left behind")
        for name in self.services:
            for kind in Kind:
                cells = ["–" if value is None else f"{value:.2f}" for value in self._pauses(name, kind).values()]
                left = str(self.left_behind.get(name, "?")) if kind is Kind.KILL else ""
                share = f"{len(self._noticed(name, kind))} of {len(self._silences.get((name, kind), ()))}"
                table.add_row(name, f"SIG{kind.name}", str(self._blows.get((name, kind), 0)), share, *cells, left)
        console.print(table)
        for problem in self.problems[:20]:
            console.print(f"[red]{problem}[/]", highlight=False)
        console.print(
            f"{self.streams} streams, {self.completed} completed, {self.identical} identical to the undisturbed run, "
            f"{self.near_ties} different from a near-tie on, {self.drawn_otherwise} drawn otherwise",
            style="green" if self.clean else "red",
            highlight=False,
        )

    def _noticed(self, service: str, kind: Kind) -> list[float]:
        """Only those whom it met: with several processes of a service the streams of the others flow on."""
        return [silence for silence in self._silences.get((service, kind), ()) if silence >= NOTICEABLE_S]

    def _pauses(self, service: str, kind: Kind) -> dict[str, float | None]:
        noticed = self._noticed(service, kind)
        if not noticed:
            return {"p50": None, "p99": None, "max": None}
        p50, p99 = np.percentile(noticed, [50, 99])
        return {"p50": round(float(p50), 3), "p99": round(float(p99), 3), "max": round(max(noticed), 3)}


def _problem(answer: Answer) -> str:
    return answer.problem or f"{answer.finishes} finishes, {'' if answer.completed else 'not '}completed"
