"""A model folder's weights, each tensor read when it is asked for, whatever reads it and whatever it is read as.

`torch_weights.py` gives tensors on a device, `array_weights.py` arrays, without PyTorch.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from services.runtime.log import get_logger
from services.scheduler.model.errors import UnsupportedModelError

REPORT_INTERVAL_S = 5.0

_log = get_logger("scheduler")

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
GGUF = "model.gguf"
"""In a folder made from a GGUF file: that file, or a link to it."""

_UNUSED_SUFFIX = ".rotary_emb.inv_freq"  # old exports keep this table; it follows from the configuration


class Numbers(Protocol):
    """What a tensor of PyTorch and an array of numpy have in common here."""

    @property
    def shape(self) -> tuple[int, ...]: ...
    def __add__(self, other: Any, /) -> Any: ...


N = TypeVar("N", bound=Numbers)

Sources = Mapping[str, Callable[[], N]]
"""Each tensor by Hugging Face's name, and what reads it as it is stored."""
Converted = Callable[[N, bool], N]
"""A stored tensor as its user wants it; True asks for fp32 whatever the rest is in."""


class Weights(Generic[N]):
    """The tensors of an open model folder; `take` gives one, `finish` complains of what nobody took."""

    def __init__(self, sources: Sources[N], converted: Converted[N]) -> None:
        self._sources = sources
        self._converted = converted
        self._taken: set[str] = set()
        self._reported = time.monotonic()
        self.values_taken = 0

    def __contains__(self, name: str) -> bool:
        return name in self._sources

    def take(self, name: str, *shape: int, fp32: bool = False) -> N:
        """The tensor under `name`, converted, or as `fp32`; raises UnsupportedModelError."""
        if name not in self._sources:
            raise UnsupportedModelError(f"the weights have no tensor {name!r}")
        tensor = self._sources[name]()
        if tensor.shape != shape:
            raise UnsupportedModelError(f"tensor {name!r} is {tuple(tensor.shape)}; the configuration says {shape}")
        self._taken.add(name)
        self.values_taken += math.prod(shape)
        self._report()
        return self._converted(tensor, fp32)

    def _report(self) -> None:
        """One line now and then, so that nobody takes a long load for a standstill."""
        now = time.monotonic()
        if now - self._reported >= REPORT_INTERVAL_S:
            self._reported = now
            _log.info("loading weights", tensors=len(self._taken), of=len(self._sources))

    def skip(self, name: str) -> None:
        """Says that a tensor isn't needed although it may be there."""
        self._taken.add(name)

    def finish(self) -> None:
        """Raises UnsupportedModelError if a tensor was left: the model has parts that would be silently missing."""
        left = [name for name in self._sources if name not in self._taken and not name.endswith(_UNUSED_SUFFIX)]
        if left:
            raise UnsupportedModelError(
                f"the weights hold {len(left)} tensors that the configuration doesn't tell of: {left[0]!r}, …"
            )


def safetensors_files(folder: Path) -> list[Path]:
    """`model.safetensors`, or the shards of its index; raises UnsupportedModelError."""
    if (folder / _SINGLE).exists():
        return [folder / _SINGLE]
    index = folder / _INDEX
    if not index.exists():
        raise UnsupportedModelError(f"{folder} has neither {_SINGLE} nor {_INDEX} nor {GGUF}")
    return [folder / name for name in sorted(set(_weight_map(index).values()))]


def _weight_map(index: Path) -> dict[str, str]:
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UnsupportedModelError(f"{index} can't be read: {error!r}") from error
    return dict(weight_map)
