"""What an engine asks of a sampler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from services.scheduler.engine.api import Failed, Sampled, SamplingSpec, SequenceKey, Slice


class StepSampler(Protocol):
    """Keeps what it needs of each open sequence, and draws for whole batches; see `Sampler`."""

    def open(
        self, key: SequenceKey, spec: SamplingSpec, prompt_ids: Sequence[int], output_ids: Sequence[int]
    ) -> None: ...

    def close(self, key: SequenceKey) -> None: ...

    def sample(self, logits: torch.Tensor, slices: Sequence[Slice]) -> list[Sampled | Failed]: ...
