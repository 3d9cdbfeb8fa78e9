"""Builds sampling slices and runs a sampler once: what the sampling tests share."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from services.scheduler.engine.api import Failed, Sampled, SamplingSpec, SequenceKey, Slice
from services.scheduler.engine.sampling.sampler import Sampler

CPU = torch.device("cpu")


def sample_each(
    logits: torch.Tensor,
    specs: Sequence[SamplingSpec],
    *,
    position: int = 0,
    prompt: Sequence[int] = (),
    output: Sequence[int] = (),
    suppress: bool = False,
) -> list[Sampled | Failed]:
    """One answer per row of logits, each row a sequence with its own spec."""
    sampler = Sampler(logits.shape[1], CPU)
    slices = []
    for row, spec in enumerate(specs):
        sampler.open(SequenceKey(row), spec, prompt, output)
        slices.append(Slice(SequenceKey(row), [0], 0, [0], True, position, suppress))
    return sampler.sample(logits.clone(), slices)


def token(logits: Sequence[float], spec: SamplingSpec, **rest: object) -> int:
    """The token drawn from one row."""
    (answer,) = sample_each(torch.tensor([list(logits)]), [spec], **rest)
    assert isinstance(answer, Sampled), answer
    return answer.token_id


def frequencies(logits: Sequence[float], draws: int, **options: object) -> torch.Tensor:
    """How often each id is drawn, over many seeds, as a share of all."""
    specs = [SamplingSpec(seed=seed, **options) for seed in range(draws)]
    answers = sample_each(torch.tensor([list(logits)]).repeat(draws, 1), specs)
    ids = torch.tensor([answer.token_id for answer in answers if isinstance(answer, Sampled)])
    assert len(ids) == draws
    return torch.bincount(ids, minlength=len(logits)) / draws
