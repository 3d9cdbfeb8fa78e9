from collections.abc import Sequence

import pytest

from services.scheduler.batch import Opening, Plan
from services.scheduler.engine.api import Answer, Failed, FailureKind, Sampled, SamplingSpec, SequenceKey, Slice
from services.scheduler.engine.fake import FakeConfig, FakeEngine
from services.scheduler.execution import Execution

KEYS = [SequenceKey(number) for number in (1, 2, 3)]


class MoodyEngine(FakeEngine):
    """A fake engine that also refuses to open some sequences, and raises what it is told to."""

    def __init__(self, refuses: Sequence[SequenceKey] = (), error: Exception | None = None) -> None:
        super().__init__(FakeConfig(step_error_id=99))
        self.refuses = refuses
        self.error = error
        self.stepped: list[list[SequenceKey]] = []

    def open(self, key: SequenceKey, spec: SamplingSpec, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> None:
        if key in self.refuses:
            raise ValueError("not this one")
        super().open(key, spec, prompt_ids, output_ids)

    def step(self, slices: Sequence[Slice]) -> list[Answer]:
        self.stepped.append([part.key for part in slices])
        if self.error is not None:
            raise self.error
        return super().step(slices)


def plan_for(prompts: dict[SequenceKey, tuple[int, ...]]) -> Plan:
    plan = Plan([])
    for key, prompt in prompts.items():
        plan.opens.append(Opening(key, SamplingSpec(seed=1), prompt, ()))
        plan.slices.append(Slice(key, prompt, 0, (0,), True, 0, False))
    return plan


def test_a_step_that_fails_is_repeated_one_by_one_and_only_the_culprit_ends() -> None:
    engine = MoodyEngine()
    execution = Execution(engine)
    answers = execution.run(plan_for({KEYS[0]: (5,), KEYS[1]: (99,), KEYS[2]: (7,)}))
    assert [(answer.key, type(answer)) for answer in answers] == [
        (KEYS[0], Sampled),
        (KEYS[1], Failed),
        (KEYS[2], Sampled),
    ]
    assert engine.stepped == [KEYS, [KEYS[0]], [KEYS[1]], [KEYS[2]]]


def test_a_sequence_that_cannot_be_opened_fails_and_is_not_stepped() -> None:
    engine = MoodyEngine(refuses=[KEYS[1]])
    execution = Execution(engine)
    answers = execution.run(plan_for({KEYS[0]: (5,), KEYS[1]: (6,)}))
    assert [(answer.key, type(answer)) for answer in answers] == [(KEYS[1], Failed), (KEYS[0], Sampled)]
    assert engine.stepped == [[KEYS[0]]]


def test_closing_what_was_never_opened_harms_nobody() -> None:
    engine = MoodyEngine(refuses=[KEYS[1]])
    execution = Execution(engine)
    execution.run(plan_for({KEYS[0]: (5,), KEYS[1]: (6,)}))
    plan = Plan([KEYS[1], KEYS[0]])
    assert execution.run(plan) == []
    assert not engine._sequences


@pytest.mark.parametrize(
    ("error", "kind"),
    [(MemoryError(), FailureKind.OUT_OF_MEMORY), (RuntimeError("no"), FailureKind.INTERNAL)],
)
def test_the_kind_of_a_failure_is_told(error: Exception, kind: FailureKind) -> None:
    answers = Execution(MoodyEngine(error=error)).run(plan_for({KEYS[0]: (5,)}))
    assert isinstance(answers[0], Failed)
    assert answers[0].kind is kind


def test_closes_come_before_opens_so_that_a_preempted_sequence_can_return() -> None:
    engine = MoodyEngine()
    execution = Execution(engine)
    execution.run(plan_for({KEYS[0]: (5,)}))
    again = plan_for({KEYS[0]: (5,)})
    again.closes.append(KEYS[0])
    assert isinstance(execution.run(again)[0], Sampled)
    assert list(engine._sequences) == [KEYS[0]]
