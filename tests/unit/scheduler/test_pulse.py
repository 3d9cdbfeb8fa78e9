from services.scheduler.pulse import Pulse


def test_between_steps_nothing_is_stalled() -> None:
    pulse = Pulse()
    assert not pulse.stalled(1.0, 1e9)
    pulse.begin(10, 0.0)
    pulse.end(0.5)
    assert not pulse.stalled(1.0, 1e9)


def test_a_step_beyond_the_bound_is_stalled() -> None:
    pulse = Pulse()
    pulse.begin(1, 0.0)
    assert not pulse.stalled(5.0, 5.0)
    assert pulse.stalled(5.0, 5.1)


def test_a_long_prefill_gets_the_time_that_its_size_explains() -> None:
    pulse = Pulse()
    pulse.begin(100, 0.0)
    pulse.end(1.0)
    pulse.begin(1000, 10.0)
    assert not pulse.stalled(5.0, 10.0 + 5.0 + 99.0)
    assert pulse.stalled(5.0, 10.0 + 5.0 + 101.0)


def test_a_lone_token_gets_no_more_time_than_tokens_take() -> None:
    pulse = Pulse()
    pulse.begin(100, 0.0)
    pulse.end(1.0)
    pulse.begin(1, 10.0)
    assert pulse.stalled(5.0, 10.0 + 5.2)


def test_one_slow_step_counts_at_once_and_is_forgotten_slowly() -> None:
    pulse = Pulse()
    pulse.begin(10, 0.0)
    pulse.end(10.0)
    for _ in range(100):
        pulse.begin(10, 0.0)
        pulse.end(0.01)
    pulse.begin(10, 0.0)
    assert pulse.stalled(1.0, 2.0)
