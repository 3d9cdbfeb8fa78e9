"""The stop matcher on its own, against every match tried at every place."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from services.detokenizer.stopper import Match, Stopper
from tests.unit.detokenizer.oracle import first_stop
from tests.unit.detokenizer.texts import examples

FEW = st.text("ab", max_size=6)


@settings(max_examples=examples(250))
@given(st.lists(st.text("ab", min_size=1, max_size=5), max_size=4), st.lists(FEW, max_size=12))
def test_the_first_match_and_the_holdback_are_those_of_a_search_everywhere(stops: list[str], texts: list[str]) -> None:
    stopper, text = Stopper(stops), ""
    for more in texts:
        before, text = text, text + more
        match, expected = stopper.push(more), first_stop(stops, before, text)
        if expected is not None:
            start, stop = expected
            assert match == Match(stop, len(text) - start, len(text) - start - len(stop))
            return
        assert match is None
        prefixes = [stop[:length] for stop in stops for length in range(1, len(stop))]
        assert stopper.held == max((len(prefix) for prefix in prefixes if text.endswith(prefix)), default=0)


@settings(max_examples=examples(120))
@given(st.lists(st.text("ab", min_size=1, max_size=4), max_size=3), st.lists(st.tuples(FEW, FEW), max_size=8))
def test_places_count_shown_characters_only(stops: list[str], texts: list[tuple[str, str]]) -> None:
    """The same stops, found in shown and hidden text together; what is told leaves the hidden characters out."""
    stopper, full, shown = Stopper(stops), "", []
    for visible, hidden in texts:
        before, full = full, full + visible + hidden
        shown += [True] * len(visible) + [False] * len(hidden)
        match, expected = stopper.push(visible, hidden), first_stop(stops, before, full)
        if expected is not None:
            start, stop = expected
            assert match == Match(stop, sum(shown[start:]), sum(shown[start + len(stop) :]))
            return
        prefixes = [stop[:length] for stop in stops for length in range(1, len(stop))]
        held = max((len(prefix) for prefix in prefixes if full.endswith(prefix)), default=0)
        assert stopper.held == sum(shown[len(full) - held :])


def test_a_match_that_may_not_end_anything_yet_is_passed_over_and_can_come_again() -> None:
    stopper = Stopper(["aa"])
    assert stopper.push("aa", effective=False) is None
    assert stopper.held == 1, "the second a may begin another"
    assert stopper.push("a") == Match("aa", 2, 0)


def test_stops_that_share_every_beginning_cost_no_deep_recursion() -> None:
    stops = ["a" * length + "b" for length in range(1, 1024, 16)]
    stopper = Stopper(stops)
    assert stopper.push("a" * 5000) is None
    assert stopper.held == len(stops[-1]) - 1
    assert stopper.push("b") == Match(stops[-1], len(stops[-1]), 0)


def test_a_long_stop_costs_nothing_before_the_text_reaches_it() -> None:
    stopper = Stopper(["x" * 1024] * 64)
    assert stopper.push("nothing of it") is None
    assert stopper.idle
    assert len(stopper._root._children) == 0


def test_without_stops_nothing_is_held() -> None:
    stopper = Stopper(["", ""])
    assert stopper.push("anything") is None
    assert (stopper.held, stopper.idle) == (0, True)
