import time

from services.runtime.clock import Clock, SystemClock


def test_monotonic_time_never_goes_back() -> None:
    clock: Clock = SystemClock()
    moments = [clock.now() for _ in range(1000)]
    assert moments == sorted(moments)


def test_wall_clock_is_in_milliseconds_since_1970() -> None:
    before = time.time()
    told = SystemClock().unix_ms()
    assert before - 1 <= told / 1000 <= time.time() + 1
