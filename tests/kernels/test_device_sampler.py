"""The GPU's sampler gives the CPU's answers: the same ids, logprobs and failures, whatever a batch mixes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

import pytest
import torch

from services.scheduler.engine.api import Failed, Sampled, SamplingSpec, SequenceKey, Slice
from services.scheduler.engine.sampling.device_sampler import DeviceSampler
from services.scheduler.engine.sampling.sampler import Sampler

pytestmark = pytest.mark.timeout(300)  # the interpreter is slow, and other tests may share its cores

VOCAB_SIZE = 77
INFINITY = float("inf")
Answers = list[Sampled | Failed]
Steps = Sequence[torch.Tensor]


@dataclass
class Evens:
    """A constraint: even ids, then the one after the last."""

    seen: list[int] = field(default_factory=list)

    def start(self, output_ids: Sequence[int]) -> Evens:
        return Evens(list(output_ids))

    def allowed(self) -> bytes:
        if self.seen:
            return (1 << (self.seen[-1] + 1) % VOCAB_SIZE).to_bytes(10, "little")
        return bytes([0b01010101] * 10)

    def accept(self, token: int) -> None:
        self.seen.append(token)


SPECS = [
    SamplingSpec(seed=1, temperature=0.0, presence_penalty=4.0, frequency_penalty=0.5),
    SamplingSpec(seed=2**63 + 5, choice=3),
    SamplingSpec(seed=3, temperature=1.7, top_k=9, top_p=0.8, repetition_penalty=1.4, logprobs=0),
    SamplingSpec(seed=4, logit_bias=((5, 3.0), (6, -INFINITY)), suppressible_ids=(0, 1, 2, 2**40), logprobs=3),
    SamplingSpec(seed=5, constraint=Evens(), repetition_penalty=0.8),
    SamplingSpec(seed=6, temperature=0.0, logprobs=2),
]


def answers(sampler: Sampler | DeviceSampler, steps: Steps, specs: Sequence[SamplingSpec]) -> list[Answers]:
    """Of each step; suppressed are the first's ids."""
    for key, spec in enumerate(specs):
        sampler.open(SequenceKey(key), spec, [3, 3, 70], [8] if spec.constraint is None else [])
    found = []
    for position, logits in enumerate(steps):
        slices = [Slice(SequenceKey(key), [0], 0, [0], True, position, position == 0) for key in range(len(specs))]
        found.append(sampler.sample(logits, slices))
    for key in range(len(specs)):
        sampler.close(SequenceKey(key))
    return found


def compare(steps: list[torch.Tensor], specs: Sequence[SamplingSpec], device: torch.device) -> list[Answers]:
    expected = answers(Sampler(VOCAB_SIZE, torch.device("cpu")), [step.clone() for step in steps], specs)
    got = answers(DeviceSampler(VOCAB_SIZE, device), [step.to(device) for step in steps], specs)
    for mine, theirs in zip(chain(*got), chain(*expected), strict=True):
        if isinstance(theirs, Failed) or isinstance(mine, Failed):
            assert mine == theirs
            continue
        assert mine.token_id == theirs.token_id
        assert (mine.logprobs is None) == (theirs.logprobs is None)
        if mine.logprobs and theirs.logprobs:
            assert mine.logprobs.top_ids == theirs.logprobs.top_ids
            assert mine.logprobs.logprob == pytest.approx(theirs.logprobs.logprob, abs=1e-4)
            assert mine.logprobs.top_logprobs == pytest.approx(theirs.logprobs.top_logprobs, abs=1e-4)
    return got


def test_a_mixed_batch_gives_the_cpus_answers_step_after_step(device: torch.device) -> None:
    found = compare([torch.randn(len(SPECS), VOCAB_SIZE) * 2 for _ in range(3)], SPECS, device)
    assert all(isinstance(answer, Sampled) for step in found for answer in step)


def test_rows_that_cannot_be_drawn_fail_alone_and_say_why(device: torch.device) -> None:
    nothing = SamplingSpec(seed=1, logit_bias=tuple((token, -INFINITY) for token in range(VOCAB_SIZE)))
    specs = [SamplingSpec(seed=0), SamplingSpec(seed=0, presence_penalty=1.0), nothing, SamplingSpec(seed=9)]
    logits = torch.randn(4, VOCAB_SIZE)
    logits[0, 50], logits[1, 3] = math.nan, INFINITY
    found = compare([logits], specs, device)[0]
    assert [isinstance(answer, Failed) for answer in found] == [True, True, True, False]


def test_counts_of_one_sequence_are_gone_before_the_next_takes_them(device: torch.device) -> None:
    sampler = DeviceSampler(VOCAB_SIZE, device)
    spec = SamplingSpec(seed=0, temperature=0.0, presence_penalty=9.0)
    logits = torch.arange(VOCAB_SIZE, 0, -1).float()[None] / 10
    for _ in range(2):
        (drawn,) = answers(sampler, [logits.to(device).clone()], [spec])
        assert [answer.token_id for answer in drawn if isinstance(answer, Sampled)] == [0]


@pytest.mark.parametrize("bad_id", [-1, VOCAB_SIZE])
def test_bias_out_of_the_vocabulary_is_refused(bad_id: int, device: torch.device) -> None:
    spec = SamplingSpec(seed=0, logit_bias=((bad_id, 1.0),))
    with pytest.raises(ValueError, match="logit_bias"):
        DeviceSampler(VOCAB_SIZE, device).open(SequenceKey(1), spec, (), ())


def test_an_empty_batch_gives_no_answers(device: torch.device) -> None:
    assert DeviceSampler(5, device).sample(torch.empty(0, 5, device=device), []) == []
