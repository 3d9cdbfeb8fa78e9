"""Which ids a sequence holds, and how often each stands in its output."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

IdArray = np.ndarray[Any, np.dtype[np.int64]]
FloatArray = np.ndarray[Any, np.dtype[np.float32]]


class TokenCounts:
    """Arrays that grow in place."""

    def __init__(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> None:
        self._places = {token: place for place, token in enumerate(dict.fromkeys((*prompt_ids, *output_ids)))}
        self._ids = np.fromiter(self._places, dtype=np.int64, count=len(self._places))
        self._counts = np.zeros(len(self._places), dtype=np.float32)
        for token in output_ids:
            self._counts[self._places[token]] += 1

    def add(self, token: int) -> None:
        """Counts one more output token."""
        place = self._places.setdefault(token, len(self._places))
        if place == len(self._ids):
            self._ids = np.resize(self._ids, 2 * place + 16)
            self._counts = np.concatenate((self._counts, np.zeros(place + 16, dtype=np.float32)))
        self._ids[place] = token
        self._counts[place] += 1

    def arrays(self) -> tuple[IdArray, FloatArray]:
        """Distinct ids and their counts in the output."""
        size = len(self._places)
        return self._ids[:size], self._counts[:size]
