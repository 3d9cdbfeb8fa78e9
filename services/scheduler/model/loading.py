"""Which code runs a model: ours where its family is native, transformers' own for the rest."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch

from kernels.ops import Ops
from services.scheduler.model.config import Described
from services.scheduler.model.config_json import architecture_of, read_json
from services.scheduler.model.decoder import ForwardBatch, load_decoder
from services.scheduler.model.errors import UnsupportedModelError
from services.scheduler.model.families import FAMILIES
from services.scheduler.model.kv_cache import KvCache


class Model(Protocol):
    """A loaded model, as an engine sees it; it holds weights and nothing that changes."""

    @property
    def config(self) -> Described: ...

    parameters: int
    operations: str
    """What computes it, for the start-up report."""

    def forward(self, batch: ForwardBatch, cache: KvCache) -> torch.Tensor:
        """Computes all rows, writes their keys and values, and returns logits (logit rows, vocab_size)."""


def load_model(
    folder: Path, ops: Ops, *, dtype: torch.dtype, device: torch.device, deterministic: bool = False
) -> Model:
    """Loads a model folder; raises UnsupportedModelError naming what isn't supported, or not there.

    `deterministic` says that `ops` give a row the same bits whatever is beside it, and that the whole model must.
    """
    architecture = architecture_of(read_json(folder / "config.json"))
    if architecture in FAMILIES:
        return load_decoder(folder, ops, dtype=dtype, device=device)
    if deterministic:
        raise UnsupportedModelError(
            f"deterministic can't be had for {architecture}: transformers computes it, in an order that the batch "
            f"decides; it can for {', '.join(FAMILIES)}"
        )
    # Imported here: its models' library takes seconds, which no native model needs.
    from services.scheduler.model.foreign import load_foreign

    return load_foreign(folder, ops, dtype=dtype, device=device)
