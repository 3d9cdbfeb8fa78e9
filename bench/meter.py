"""What a load generator notes while it reads: how far each stream is, when deltas came, what the services cost.

A run is judged by its steady window alone, which begins a moment after every stream has its first delta, and in which
none ends. So neither setting a request up nor ending it is counted.
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
START_TIMEOUT_S = 30.0
"""A machine that can't keep up may never have them all at once; then the window begins with those that flow."""
WINDOW_S_MIN = 0.5
TOKENS_MAX = 8000
"""Asked for per stream: near the context's end, so that streams outlast the window and are left then."""
CHARACTERS_PER_TOKEN = 4
FAKE_IDS = ("--fake-first-id", "1253", "--fake-end-id", "1259")
"""SmolLM2's " pos", "ency" and the like: SSE tells no ids, but all of these are 4 characters long."""
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


def cpu_s(pid: int) -> float:
    """CPU seconds that a process has used so far, in user and system mode; its resolution is a clock tick (10 ms)."""
    with open(f"/proc/{pid}/stat", "rb") as stat:
        fields = stat.read().rpartition(b")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


@dataclass(frozen=True, slots=True)
class Sample:
    """One moment: CPU seconds per process, and tokens of all streams."""

    at: float
    cpu_s: tuple[float, ...]
    tokens: float


@dataclass(frozen=True, slots=True)
class Window:
    """What one run gave; CPU in the order of the pids, latencies (p50, p99) in milliseconds."""

    seconds: float
    tokens: float
    cpu_s: tuple[float, ...]
    latencies_ms: tuple[float, ...]

    def as_json(self) -> dict[str, object]:
        """For the process that started this one."""
        return asdict(self)


class Meter:
    """Counts one run's streams for `window_s` seconds. `add` is called once per delta, so it does next to nothing."""

    def __init__(self, streams: int, pids: Sequence[int], window_s: float) -> None:
        self.streams = streams
        self.arrivals = array("d")
        self.over = asyncio.Event()
        """Set once there is nothing more to learn: the window is full, or a stream has ended."""
        self._started = [False] * streams
        self._waiting = streams
        self._tokens = 0.0
        self._pids = tuple(pids)
        self._window_s = window_s
        self._samples: list[Sample] = []

    def add(self, stream: int, tokens: float) -> None:
        """A delta came."""
        self.arrivals.append(time.time())
        self._tokens += tokens
        if not self._started[stream]:
            self._started[stream] = True
            self._waiting -= 1

    async def sample(self) -> None:
        """Takes samples until it is over."""
        begin_by = time.time() + START_TIMEOUT_S
        while self._waiting and time.time() < begin_by and not self.over.is_set():  # noqa: ASYNC110  # `add` is hot
            await asyncio.sleep(SAMPLE_INTERVAL_S)
        await asyncio.sleep(SETTLE_S)
        until = time.time() + self._window_s
        while not self.over.is_set():
            self._samples.append(Sample(time.time(), tuple(map(cpu_s, self._pids)), self._tokens))
            if time.time() >= until:
                self.over.set()
            await asyncio.sleep(SAMPLE_INTERVAL_S)

    def window(self, pace_ms: float) -> Window | None:
        """The steady window; None when streams ended before there was one of WINDOW_S_MIN."""
        if not self._samples or self._samples[-1].at - self._samples[0].at < WINDOW_S_MIN:
            return None
        first, last = self._samples[0], self._samples[-1]
        return Window(
            seconds=last.at - first.at,
            tokens=last.tokens - first.tokens,
            cpu_s=tuple(map(float, np.subtract(last.cpu_s, first.cpu_s))),
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
