"""What the answers of one run say about a server."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import numpy as np

from bench.serving.targets import Heard


@dataclass(frozen=True, slots=True)
class Objective:
    """What a caller is content with; goodput counts the requests a second that keep both."""

    ttft_s: float = 1.0
    tpot_s: float = 0.1

    def kept(self, heard: Heard) -> bool:
        """Whether this answer did."""
        return heard.ttft_s <= self.ttft_s and heard.tpot_s <= self.tpot_s


@dataclass(frozen=True, slots=True)
class Figures:
    """One run. Latencies are milliseconds as (p50, p90, p99)."""

    requests: int
    output_tokens: int
    cached_tokens: int
    seconds: float
    ttft_ms: tuple[float, ...]
    itl_ms: tuple[float, ...]
    tpot_ms: tuple[float, ...]
    end_to_end_ms: tuple[float, ...]
    goodput_per_s: float

    @property
    def output_tokens_per_s(self) -> float:
        """Over the whole run, prefill included."""
        return self.output_tokens / self.seconds


def figures_of(answers: Sequence[Heard], objective: Objective) -> Figures:
    """Of all answers of one run, at least one."""
    seconds = max(heard.moments[-1] for heard in answers) - min(heard.sent_at for heard in answers)
    return Figures(
        requests=len(answers),
        output_tokens=sum(heard.output_tokens for heard in answers),
        cached_tokens=sum(heard.cached_tokens for heard in answers),
        seconds=seconds,
        ttft_ms=_percentiles([heard.ttft_s for heard in answers]),
        itl_ms=_percentiles([after - before for heard in answers for before, after in pairwise(heard.moments)]),
        tpot_ms=_percentiles([heard.tpot_s for heard in answers if heard.output_tokens > 1]),
        end_to_end_ms=_percentiles([heard.moments[-1] - heard.sent_at for heard in answers]),
        goodput_per_s=sum(map(objective.kept, answers)) / seconds,
    )


def median_of(runs: Sequence[Figures]) -> dict[str, Any]:
    """The medians of several runs, as plain values."""

    def middle(name: str) -> float:
        return round(float(median(getattr(run, name) for run in runs)), 2)

    def middles(name: str) -> dict[str, float]:
        columns = zip(*(getattr(run, name) for run in runs), strict=True)
        return {key: round(median(column), 1) for key, column in zip(("p50", "p90", "p99"), columns, strict=True)}

    return {
        "runs": len(runs),
        "requests": runs[0].requests,
        "output_tokens_per_s": middle("output_tokens_per_s"),
        "goodput_per_s": middle("goodput_per_s"),
        "cached_tokens": middle("cached_tokens"),
        "seconds": middle("seconds"),
        "ttft_ms": middles("ttft_ms"),
        "itl_ms": middles("itl_ms"),
        "tpot_ms": middles("tpot_ms"),
        "end_to_end_ms": middles("end_to_end_ms"),
    }


def _percentiles(seconds: Sequence[float]) -> tuple[float, ...]:
    return tuple(float(value) * 1000 for value in np.percentile(seconds, [50, 90, 99])) if seconds else (0.0, 0.0, 0.0)
