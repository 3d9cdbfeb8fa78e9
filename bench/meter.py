"""What a load generator notes while it reads: how far each stream is, when deltas came, what the services cost.

A run is judged by its steady window alone: from the moment when every stream has its first delta (and a moment more) to
the last sample before any stream ended. So neither setting a request up nor ending it is counted.
"""

from __future__ import annotations

import asyncio
import os
import time
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

SAMPLE_INTERVAL_S = 0.05
SETTLE_S = 0.3
WINDOW_S_MIN = 0.5
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    """CPU seconds that a process has used so far, in user and system mode; its resolution is a clock tick (10 ms)."""
    with open(f"/proc/{pid}/stat", "rb") as stat:
        fields = stat.read().rpartition(b")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


@dataclass(frozen=True, slots=True)
class Sample:
    """One moment: CPU seconds per process, units (tokens or characters) per stream."""

    at: float
    cpu_s: tuple[float, ...]
    units: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Window:
    """What one run gave; CPU in the order of the pids, latencies in milliseconds."""

    seconds: float
    tokens: float
    cpu_s: tuple[float, ...]
    latencies_ms: tuple[float, ...]

    def as_json(self) -> dict[str, object]:
        """For the process that started this one."""
        return asdict(self)


class Meter:
    """Counts one run's streams. `add` is called once per delta, so it does next to nothing."""

    def __init__(self, streams: int, pids: Sequence[int]) -> None:
        self.units = [0] * streams
        self.arrivals = array("d")
        self.started = 0
        self.ended = asyncio.Event()
        self.all_ended = asyncio.Event()
        self._open = streams
        self._totals = [1.0] * streams
        self._pids = tuple(pids)
        self._samples: list[Sample] = []

    def add(self, stream: int, units: int) -> None:
        """A delta came."""
        self.arrivals.append(time.time())
        if not self.units[stream]:
            self.started += 1
        self.units[stream] += units

    def end(self, stream: int, tokens: int) -> None:
        """A stream came to its end, with this many tokens in all."""
        self._totals[stream] = tokens / max(self.units[stream], 1)
        self._open -= 1
        self.ended.set()
        if not self._open:
            self.all_ended.set()

    async def sample(self) -> None:
        """Takes samples until the first stream ends."""
        while not self.ended.is_set():
            if self.started == len(self.units):
                cpu = tuple(map(cpu_s, self._pids))
                self._samples.append(Sample(time.time(), cpu, tuple(self.units)))
            await asyncio.sleep(SAMPLE_INTERVAL_S)

    def window(self, pace_ms: float) -> Window | None:
        """The steady window; None when the run was too short to have one of WINDOW_S_MIN."""
        settled = [sample for sample in self._samples if sample.at >= self._samples[0].at + SETTLE_S]
        if not settled or settled[-1].at - settled[0].at < WINDOW_S_MIN:
            return None
        first, last = settled[0], settled[-1]
        units = np.subtract(last.units, first.units)
        cpu = np.subtract(last.cpu_s, first.cpu_s)
        return Window(
            seconds=last.at - first.at,
            # A unit is worth what it is on the whole stream: 1 token, or the share of a token that a character is.
            tokens=float(units @ np.array(self._totals)),
            cpu_s=tuple(map(float, cpu)),
            latencies_ms=self._latencies_ms(first.at, last.at, pace_ms),
        )

    def _latencies_ms(self, since: float, until: float, pace_ms: float) -> tuple[float, ...]:
        """p50 and p99 of a delta's arrival modulo the pace: the fake engine's steps end on the wall clock's grid."""
        if not pace_ms:
            return ()
        arrivals = np.frombuffer(self.arrivals)
        inside = arrivals[(arrivals >= since) & (arrivals < until)]
        if not len(inside):
            return ()
        return tuple(map(float, np.percentile(np.mod(inside * 1000, pace_ms), [50, 99])))
