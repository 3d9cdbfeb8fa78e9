from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from cli.restart_policy import BACKOFF_S_MAX, DEATHS_MAX, STEADY_S, RestartPolicy


def test_a_service_that_was_never_ready_is_not_started_again() -> None:
    assert RestartPolicy().after_death(100.0, was_ready=False) is None


def test_quick_deaths_wait_longer_each_time_and_are_given_up_at_last() -> None:
    policy = RestartPolicy()
    pauses = [policy.after_death(1.0, was_ready=True) for _ in range(DEATHS_MAX + 1)]
    waits = [pause for pause in pauses if pause is not None]
    assert pauses[-1] is None
    assert len(waits) == DEATHS_MAX
    assert all(earlier < later for earlier, later in pairwise(waits))


def test_a_restarted_service_that_dies_before_it_is_ready_counts_as_one_more_death() -> None:
    policy = RestartPolicy()
    assert policy.after_death(60.0, was_ready=True) is not None
    assert policy.after_death(0.1, was_ready=False) is not None


@given(st.lists(st.floats(STEADY_S, 1e6), min_size=1, max_size=50))
def test_steady_lives_are_always_followed_by_another(lives: list[float]) -> None:
    policy = RestartPolicy()
    assert all(policy.after_death(lived, was_ready=True) is not None for lived in lives)


@given(st.lists(st.floats(0, 1e4), max_size=50))
def test_pauses_are_bounded(lives: list[float]) -> None:
    policy = RestartPolicy()
    pauses = [policy.after_death(lived, was_ready=True) for lived in lives]
    assert all(pause is None or 0 < pause <= BACKOFF_S_MAX for pause in pauses)
