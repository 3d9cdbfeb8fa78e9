"""Where a long-lived stream from another process stands, as its receiver knows it: for operators, not for decisions."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from math import inf

from services.protocol.hello import Hello
from services.protocol.views import HopView, RouteKey
from services.runtime.clock import Clock
from services.runtime.metrics import RuntimeMetrics


class Hop:
    """One stream's ups and downs. `heard` is called per message, so it does next to nothing.

    How far it lags: each message says since when its news has waited, by the sender's clock. The smallest difference to
    ours that a call has seen is what the two clocks differ, and the shortest way; what is more is lag.
    """

    __slots__ = ("_changed_at", "_clock", "_delay_s", "_heard_at", "_shortest_s", "calls", "up", "why_not")

    def __init__(self, clock: Clock, why_not: str = "not called yet") -> None:
        self._clock = clock
        self._changed_at = self._heard_at = clock.now()
        self._delay_s, self._shortest_s = 0.0, inf
        self.calls = 0
        self.up = False
        self.why_not = why_not

    def called(self) -> None:
        """A new call was made."""
        self.calls += 1

    def heard(self, news_us: int = 0) -> None:
        """A message came, with news that has waited since `news_us`, where that is told."""
        self._heard_at = now = self._clock.now()
        if news_us:
            self._delay_s = delay_s = now - news_us / 1e6
            if delay_s < self._shortest_s:
                self._shortest_s = delay_s

    def opened(self) -> None:
        """The call is up."""
        self._delay_s, self._shortest_s = 0.0, inf
        self._move(True, "")

    def lost(self, why: str) -> None:
        """The call is over, or can't be used."""
        self._move(False, why)

    def view(
        self, what: str, sender: str, *, scheduler: str = "", hello: Hello | None = None, route: RouteKey | None = None
    ) -> HopView:
        """What operators see of it."""
        now = self._clock.now()
        return HopView(
            what=what,
            sender=sender,
            scheduler=scheduler,
            hello=hello,
            up=self.up,
            why_not=self.why_not,
            since_ms=round((now - self._changed_at) * 1000),
            silent_ms=round((now - self._heard_at) * 1000),
            route=route,
            calls=self.calls,
            lag_ms=self._lag_ms,
        )

    @property
    def _lag_ms(self) -> int:
        return 0 if self._shortest_s == inf else round((self._delay_s - self._shortest_s) * 1000)

    def _move(self, up: bool, why_not: str) -> None:
        if up is not self.up:
            self._changed_at = self._clock.now()
        if up:
            self._heard_at = self._clock.now()
        self.up, self.why_not = up, why_not


def count_hops(metrics: RuntimeMetrics, hops: Callable[[], Iterable[HopView]], *kinds: str) -> None:
    """Lets the gauges of these kinds of streams be read whenever somebody asks."""

    def silence_s(kind: str) -> float:
        return max((hop.silent_ms / 1000 for hop in hops() if hop.what == kind), default=0.0)

    def lag_s(kind: str) -> float:
        return max((hop.lag_ms / 1000 for hop in hops() if hop.what == kind), default=0.0)

    def down(kind: str) -> float:
        return sum(not hop.up for hop in hops() if hop.what == kind)

    for kind in kinds:
        metrics.hop_silence_seconds.labels(kind).set_function(partial(silence_s, kind))
        metrics.hop_lag_seconds.labels(kind).set_function(partial(lag_s, kind))
        metrics.hops_down.labels(kind).set_function(partial(down, kind))
