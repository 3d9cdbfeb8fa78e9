from bench.scheduler_step import OWN_PARTS, measure

ROUNDS, STEPS = 4, 25


def own_ms_per_step(sequences: int) -> float:
    """CPU of the scheduler's own work, the best of some rounds: what else runs on the machine can only add to it."""
    rounds = [measure(sequences, STEPS).seconds for _ in range(ROUNDS)]
    return min(sum(seconds[part] for part in OWN_PARTS) for seconds in rounds) / STEPS * 1e3


def test_the_cost_of_a_step_grows_no_faster_than_its_sequences() -> None:
    # The rest is left to the processor's caches, which hundreds of sequences do not fit.
    assert own_ms_per_step(512) / 512 < 3 * own_ms_per_step(128) / 128
