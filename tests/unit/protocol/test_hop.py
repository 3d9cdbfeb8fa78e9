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


def test_news_that_comes_later_than_the_quickest_of_its_call_lags_whatever_the_two_clocks_say() -> None:
    clock = HandClock()
    hop = Hop(clock)
    for origin_s in (-50.0, 7000.0):  # another sender, whose clock has another zero
        hop.opened()
        for age_s, lag_ms in ((0.002, 0), (0.5, 498), (3.0, 2998), (0.001, 0), (0.002, 1)):
            clock.at += 1.0
            hop.heard(round((clock.at - age_s - origin_s) * 1e6))
            assert hop.view("text", "d:1").lag_ms == lag_ms
    hop.heard()
    assert hop.view("text", "d:1").lag_ms == 1, "a message that does not tell changes nothing"


def test_the_gauges_tell_of_the_worst_stream_of_a_kind() -> None:
    clock, registry = HandClock(), CollectorRegistry()
    up, down = Hop(clock), Hop(clock)
    up.opened()
    clock.at += 3.0
    count_hops(RuntimeMetrics(registry, service="x"), lambda: [up.view("text", "a"), down.view("text", "b")], "text")
    assert registry.get_sample_value("tailrace_hop_silence_seconds", {"hop": "text"}) == 3.0
    assert registry.get_sample_value("tailrace_hops_down", {"hop": "text"}) == 1
    for age_s in (0.1, 2.1):
        up.heard(round((clock.at - age_s) * 1e6))
    assert registry.get_sample_value("tailrace_hop_lag_seconds", {"hop": "text"}) == 2.0
