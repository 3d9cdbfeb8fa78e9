"""What the machine allows at most, and how much of it a system uses: bandwidth at one stream, arithmetic at many.

A decode of one stream reads every weight once a token: `weights × bits ÷ bandwidth` bounds it. Of many streams the
products bound it: of each token with every weight, but for the head, which a prompt's tokens don't go through.
Attention isn't counted.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from bench.cpu_limits import best_rate, products, reads
from kernels.cpu import Format

BITS: Mapping[str, float] = {"int8": 8.5, "int4": 5.7, "bf16": 16.0, "fp32": 32.0}
"""Of one weight in our formats, its share of the scales included; of int4 with the embedded model's head in int8."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Of all cores together, measured; the products are those of the fastest format."""

    read_gb_per_s: float
    products_gmac_per_s: float

    @property
    def plain(self) -> dict[str, float]:
        """For JSON."""
        return {name: round(value, 1) for name, value in asdict(self).items()}


@dataclass(frozen=True, slots=True)
class ModelSize:
    """How many weights a token is multiplied with."""

    layers: int
    head: int


def measured_limits() -> Limits:
    """Takes some seconds on an idle machine, and is too low on a busy one."""
    cores = len(os.sched_getaffinity(0))
    fastest = max(best_rate(partial(products, stored), cores) for stored in Format)
    return Limits(best_rate(reads, cores) / 1e9, fastest / 1e9)


def size_of(model: Path) -> ModelSize:
    """Read from the exported model's header. Embeddings that are the head too are its head."""
    with (model / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    weights = {name: math.prod(told["shape"]) for name, told in header.items() if len(told.get("shape", ())) == 2}
    embeddings = sum(count for name, count in weights.items() if "embed_tokens" in name)
    head = sum(count for name, count in weights.items() if "lm_head" in name)
    return ModelSize(sum(weights.values()) - embeddings - head, head or embeddings)


def share_of(row: Mapping[str, Any], bits: float | None, limits: Limits, size: ModelSize) -> dict[str, Any] | None:
    """Which limit binds this load, and the share of it that a row reaches; None for other loads."""
    if row["load"] == "c1" and bits is not None:
        tokens_per_s = 1000 / row["tpot_ms"]["p50"]
        used = tokens_per_s * (size.layers + size.head) * bits / 8 / 1e9
        return {"limit": "bandwidth", "share": round(used / limits.read_gb_per_s, 2)}
    if row["load"] == "c32":  # it asks for as many tokens as it sends
        used = row["output_tokens_per_s"] * (2 * size.layers + size.head) / 1e9
        return {"limit": "arithmetic", "share": round(used / limits.products_gmac_per_s, 2)}
    return None
