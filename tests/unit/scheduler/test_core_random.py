"""Random mixes of everything that can happen, with every account checked."""

import random

import pytest

from services.runtime.errors import Overloaded
from services.scheduler.admission import Limits
from services.scheduler.submission import ChoiceStart
from tests.unit.scheduler.driver import Driver, alone


class Mix:
    """One seeded run: submits, aborts, releases, deadlines and steps in random order, on a pool that is too small.

    Every second step, or so, is planned while the one before is in flight, and then may still let somebody in.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.ahead = 0
        block_size = self.random.choice([1, 4, 16])
        self.driver = Driver(
            block_size=block_size,
            total_blocks=self.random.choice([200, 320]) // block_size,
            draft_tokens=seed % 3 * 3,
            limits=Limits(max_running=8, max_waiting=16, max_step_tokens=self.random.choice([8, 20, 64])),
            eos_after=lambda prompt, spec: len(prompt) % 13 + 5 if len(prompt) % 3 == 0 else None,
        )
        self.submitted = 0
        self.preempted = 0
        self.accepted = 0

    def run(self, attempts: int) -> None:
        while self.submitted < attempts:
            self._event()
            step = self.driver.begin()
            self._some_events()
            if self.random.random() < 0.6 and (plan := self.driver.look_ahead()) is not None:
                self.ahead += 1
                self._some_events()
                self.driver.core.extend(plan)
            self.driver.finish()
            self.accepted += step.accepted
            if self.driver.steps % 25 == 0:
                self.driver.core.check_integrity()
        self.driver.run()

    def _some_events(self) -> None:
        for _ in range(self.random.choice([0, 0, 1, 3])):
            self._event()

    def _event(self) -> None:
        live = list(self.driver.core.attempts)
        kind = self.random.random()
        if kind < 0.7 or not live:
            self._submit()
        elif kind < 0.85:
            self.driver.abort(self.random.choice(live))
        elif kind < 0.94:
            attempt_id = self.random.choice(live)
            self.preempted += sum(s.preemptions for s in self.driver.core.attempts[attempt_id].sequences)
            self.driver.release(attempt_id)
        elif kind < 0.95:
            self.driver.core.cache.flush()
        else:
            self.driver.now += self.random.random()

    def _submit(self) -> None:
        choices = tuple(ChoiceStart(number) for number in range(self.random.choice([1, 1, 1, 3])))
        deadline = self.random.choice([None, None, 1.5])
        try:
            self.driver.submit(
                self.submitted + 1,
                range(20, 21 + self.random.randrange(60)),
                tenant=self.random.choice(["", "", "b"]),
                choices=choices,
                max_tokens=self.random.randrange(1, 90),
                deadline_in_s=deadline,
            )
            self.submitted += 1
        except Overloaded:
            pass


@pytest.mark.parametrize("seed", range(6))
def test_accounts_hold_after_a_random_mix_of_finishes_aborts_preemptions_flushes_and_prefix_hits(seed: int) -> None:
    mix = Mix(seed)
    mix.run(350)  # 2,100 attempts over all seeds
    driver = mix.driver
    assert mix.preempted + sum(s.preemptions for a in driver.core.attempts.values() for s in a.sequences) > 0
    assert mix.ahead > 50
    assert (mix.accepted > 100) == (driver.fake.config.draft_tokens > 0 and driver.fake.config.block_size > 1)
    assert any(log.cached_prompt_tokens for log in driver.logs.values())
    driver.assert_idle()
    for (attempt_id, choice), log in driver.logs.items():
        assert attempt_id not in driver.core.attempts or log.end is not None
        if log.end is not None:
            assert log.end.token_offset == len(log.ids), (attempt_id, choice)
    driver.release(*driver.core.attempts)
    assert driver.core.known.held == 0


@pytest.mark.parametrize("seed", [11, 12, 14])
def test_whatever_happened_around_it_a_sequence_s_output_is_a_prefix_of_what_it_is_alone(seed: int) -> None:
    mix = Mix(seed)
    mix.run(120)
    for (attempt_id, choice), log in mix.driver.logs.items():
        if choice == 0 and log.ids:
            attempt = mix.driver.core.attempts.get(attempt_id)
            if attempt is not None:
                whole = alone(attempt_id, attempt.submission.prompt_ids, max_tokens=89, ignore_eos=True)
                produced = log.ids.tolist()
                if produced[-1] == 2:
                    produced.pop()
                assert produced == whole[: len(produced)]
