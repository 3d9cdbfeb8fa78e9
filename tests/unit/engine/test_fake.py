"""The fake engine's promises: pure functions of position, echo, end-of-text, injected failures, pace."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.engine.api import Failed, FailureKind, Sampled, SamplingSpec, SequenceKey, Slice
from services.scheduler.engine.fake import EosAfter, FakeConfig, FakeEngine, FakeMode


def tokens(
    prompt: Sequence[int],
    spec: SamplingSpec,
    count: int,
    config: FakeConfig = FakeConfig(),  # noqa: B008 - frozen
    *,
    start: int = 0,
    key: int = 1,
    suppress: bool = False,
    eos_after: EosAfter | None = None,
) -> list[int]:
    engine = FakeEngine(config, eos_after)
    engine.open(SequenceKey(key), spec, prompt, [0] * start)
    slices = [Slice(SequenceKey(key), [1], 5, [0], True, p, suppress) for p in range(start, start + count)]
    answers = [engine.step([s])[0] for s in slices]
    assert all(isinstance(answer, Sampled) and answer.key == key for answer in answers)
    return [answer.token_id for answer in answers if isinstance(answer, Sampled)]


@given(st.lists(st.integers(0, 49151), min_size=1), st.integers(0, 2**64 - 1), st.integers(0, 30))
def test_a_continuation_goes_on_where_the_first_run_stopped(prompt: list[int], seed: int, cut: int) -> None:
    spec = SamplingSpec(seed=seed)
    assert tokens(prompt, spec, 40)[cut:] == tokens(prompt, spec, 40 - cut, start=cut, key=9)


def test_prompt_seed_and_choice_each_change_the_output() -> None:
    outputs = [
        tokens([1, 2, 3], SamplingSpec(seed=5), 20),
        tokens([1, 2, 4], SamplingSpec(seed=5), 20),
        tokens([1, 2, 3], SamplingSpec(seed=6), 20),
        tokens([1, 2, 3], SamplingSpec(seed=5, choice=1), 20),
    ]
    assert len({tuple(output) for output in outputs}) == 4


@given(st.integers(0, 1000), st.integers(1, 300))
def test_ids_stay_in_their_range(first: int, width: int) -> None:
    config = FakeConfig(vocab_size=2000, first_id=first, end_id=first + width)
    assert all(first <= token < first + width for token in tokens([7], SamplingSpec(seed=1), 50, config))


def test_echo_repeats_the_prompt() -> None:
    assert tokens([7, 8, 9], SamplingSpec(seed=1), 7, FakeConfig(mode=FakeMode.ECHO)) == [7, 8, 9, 7, 8, 9, 7]


def test_end_of_text_comes_at_its_position_and_not_while_suppressed() -> None:
    spec = SamplingSpec(seed=1, suppressible_ids=(2,))
    ends = {"eos_after": lambda prompt, spec: len(prompt)}
    assert tokens([7, 8, 9], spec, 5, **ends)[3:] == [2, 2]
    assert 2 not in tokens([7, 8, 9], spec, 5, suppress=True, **ends)


def test_suppressed_ids_do_not_come_and_none_left_is_a_failure() -> None:
    config = FakeConfig(vocab_size=4, first_id=0, total_blocks=1)
    assert set(tokens([1], SamplingSpec(seed=1, suppressible_ids=(0, 1, 2)), 9, config, suppress=True)) == {3}
    engine = FakeEngine(config)
    engine.open(SequenceKey(1), SamplingSpec(seed=1, suppressible_ids=(0, 1, 2, 3)), [1], ())
    (answer,) = engine.step([Slice(SequenceKey(1), [1], 0, [0], True, 0, True)])
    assert isinstance(answer, Failed)


def test_only_sampling_slices_are_answered() -> None:
    engine = FakeEngine()
    for key in (1, 2):
        engine.open(SequenceKey(key), SamplingSpec(seed=key), [5, 6], ())
    slices = [
        Slice(SequenceKey(1), [5], 0, [0], False, 0, False),
        Slice(SequenceKey(2), [5, 6], 0, [1], True, 0, False),
    ]
    assert [answer.key for answer in engine.step(slices)] == [2]


def test_bad_output_fails_its_own_sequence_alone() -> None:
    engine = FakeEngine(FakeConfig(bad_output_id=13))
    engine.open(SequenceKey(1), SamplingSpec(seed=1), [13], ())
    engine.open(SequenceKey(2), SamplingSpec(seed=1), [14], ())
    bad, good = engine.step([Slice(SequenceKey(key), [5], 0, [key], True, 0, False) for key in (1, 2)])
    assert isinstance(bad, Failed)
    assert bad.kind is FailureKind.BAD_OUTPUT
    assert isinstance(good, Sampled)


def test_step_error_raises_until_its_sequence_is_closed() -> None:
    engine = FakeEngine(FakeConfig(step_error_id=13))
    engine.open(SequenceKey(1), SamplingSpec(seed=1), [13], ())
    engine.open(SequenceKey(2), SamplingSpec(seed=1), [14], ())
    slices = [Slice(SequenceKey(key), [5], 0, [key], True, 0, False) for key in (1, 2)]
    with pytest.raises(RuntimeError, match="injected"):
        engine.step(slices)
    engine.close(SequenceKey(1))
    assert len(engine.step(slices[1:])) == 1


def test_logprobs_come_with_as_many_alternatives_as_asked_for() -> None:
    engine = FakeEngine()
    engine.open(SequenceKey(1), SamplingSpec(seed=1, logprobs=3), [5], ())
    (answer,) = engine.step([Slice(SequenceKey(1), [5], 0, [0], True, 0, False)])
    assert isinstance(answer, Sampled)
    assert answer.logprobs is not None
    assert answer.logprobs.top_ids[0] == answer.token_id
    assert len(answer.logprobs.top_ids) == len(answer.logprobs.top_logprobs) == 3


def test_paced_steps_end_on_the_wall_clocks_grid() -> None:
    engine = FakeEngine(FakeConfig(pace_ms=20))
    engine.open(SequenceKey(1), SamplingSpec(seed=1), [5], ())
    before = time.time()
    engine.step([Slice(SequenceKey(1), [5], 0, [0], True, 0, False)])
    assert time.time() // 0.02 > before // 0.02


def test_prefill_takes_the_simulated_time() -> None:
    engine = FakeEngine(FakeConfig(prefill_us_per_token=100))
    engine.open(SequenceKey(1), SamplingSpec(seed=1), [5] * 300, ())
    before = time.monotonic()
    engine.step([Slice(SequenceKey(1), [5] * 300, 0, [0] * 19, True, 0, False)])
    assert time.monotonic() - before >= 0.03


def test_it_imports_no_torch() -> None:
    program = "import sys, services.scheduler.engine.fake; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


@pytest.mark.parametrize("settings", [{"first_id": 10, "vocab_size": 10}, {"end_id": 99999}, {"pace_ms": -1.0}])
def test_senseless_settings_are_refused(settings: dict) -> None:
    with pytest.raises(ValueError):
        FakeConfig(**settings)
