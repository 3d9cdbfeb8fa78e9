from __future__ import annotations

from prometheus_client import CollectorRegistry

from services.protocol.hop import Hop, count_hops
from services.runtime.metrics import RuntimeMetrics


class HandClock:
    """A clock that a test moves."""

    def __init__(self) -> None:
        self.at = 100.0

    def now(self) -> float:
        return self.at

    def unix_ms(self) -> int:
        return round(self.at * 1000)


def test_a_hop_that_is_tried_again_and_again_is_down_since_the_first_time() -> None:
    clock = HandClock()
    hop = Hop(clock)
    for why in ("refused", "silent for 2 s", "refused"):
        clock.at += 1.0
        hop.called()
        hop.lost(why)
    view = hop.view("text", "d:1")
    assert (view.up, view.why_not, view.since_ms, view.calls) == (False, "refused", 3000, 3)


def test_silence_counts_from_the_last_message_and_an_opening_is_one() -> None:
    clock = HandClock()
    hop = Hop(clock)
    clock.at += 5.0
    hop.opened()
    assert hop.view("text", "d:1").silent_ms == 0
    clock.at += 0.7
    assert hop.view("text", "d:1").silent_ms == 700
    hop.heard()
    assert (hop.view("text", "d:1").silent_ms, hop.view("text", "d:1").since_ms) == (0, 700)


def test_the_gauges_tell_of_the_worst_stream_of_a_kind() -> None:
    clock, registry = HandClock(), CollectorRegistry()
    up, down = Hop(clock), Hop(clock)
    up.opened()
    clock.at += 3.0
    count_hops(RuntimeMetrics(registry, service="x"), lambda: [up.view("text", "a"), down.view("text", "b")], "text")
    assert registry.get_sample_value("tailrace_hop_silence_seconds", {"hop": "text"}) == 3.0
    assert registry.get_sample_value("tailrace_hops_down", {"hop": "text"}) == 1
