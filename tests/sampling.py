"""Builds sampling slices and runs a sampler once: what the sampling tests share, over both of the samplers for CPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from services.scheduler.engine.api import Failed, Sampled, SamplingSpec, SequenceKey, Slice
from services.scheduler.engine.sampling.host_sampler import HostSampler
from services.scheduler.engine.sampling.sampler import Sampler

CPU = torch.device("cpu")


class NumpySampler:
    """Takes batches as PyTorch's does, and draws row after row."""

    def __init__(self, vocab_size: int) -> None:
        self._sampler = HostSampler(vocab_size)
        self.open = self._sampler.open

    def sample(self, logits: torch.Tensor, slices: Sequence[Slice]) -> list[Sampled | Failed]:
        return [self._sampler.sample(s, row) for s, row in zip(slices, logits.numpy(), strict=True)]


@dataclass(frozen=True)
class Sampling:
    """Sampling by numpy, or by PyTorch."""

    by: str

    def sampler(self, vocab_size: int) -> NumpySampler | Sampler:
        """A new one."""
        return NumpySampler(vocab_size) if self.by == "numpy" else Sampler(vocab_size, CPU)

    def each(
        self,
        logits: torch.Tensor,
        specs: Sequence[SamplingSpec],
        *,
        position: int = 0,
        prompt: Sequence[int] = (),
        output: Sequence[int] = (),
        suppress: bool = False,
    ) -> list[Sampled | Failed]:
        """One answer per row of logits, each row a sequence with its own spec."""
        sampler = self.sampler(logits.shape[1])
        slices = []
        for row, spec in enumerate(specs):
            sampler.open(SequenceKey(row), spec, prompt, output)
            slices.append(Slice(SequenceKey(row), [0], 0, [0], True, position, suppress))
        return sampler.sample(logits.clone(), slices)

    def token(self, logits: Sequence[float], spec: SamplingSpec, **rest: object) -> int:
        """The token drawn from one row."""
        (answer,) = self.each(torch.tensor([list(logits)]), [spec], **rest)
        assert isinstance(answer, Sampled), answer
        return answer.token_id

    def frequencies(self, logits: Sequence[float], draws: int, **options: object) -> torch.Tensor:
        """How often each id is drawn, over many seeds, as a share of all."""
        specs = [SamplingSpec(seed=seed, **options) for seed in range(draws)]
        answers = self.each(torch.tensor([list(logits)]).repeat(draws, 1), specs)
        ids = torch.tensor([answer.token_id for answer in answers if isinstance(answer, Sampled)])
        assert len(ids) == draws
        return torch.bincount(ids, minlength=len(logits)) / draws
