"""The draw of one row in numpy, as a CPU does it: by itself, so that nothing beside it can change a bit.

It computes what `reference.py` defines, and looks at less: only what may win is sorted and gets a random number.
"""

from __future__ import annotations

from typing import Any

import numpy as np

FloatArray = np.ndarray[Any, np.dtype[np.float32]]
UintArray = np.ndarray[Any, np.dtype[np.uint32]]
IdArray = np.ndarray[Any, np.dtype[np.intp]]

HEAD_WEIGHT = 2.0**-12
"""That of `draw.py`."""
_TAIL_ID = np.array([0xFFFFFFFF], dtype=np.uint32)
_MASK = 0xFFFFFFFF


def draw_row(
    logits: FloatArray,
    key: tuple[int, int],
    *,
    temperature: float,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
) -> int:
    """One id, drawn from logits (vocab_size,) whose largest is finite; they become the weights. `key` by `row_key`."""
    weights = _weights(logits, temperature)
    floor = max(_floor(weights, top_k, top_p), min_p)
    ids = np.flatnonzero(weights >= max(floor, HEAD_WEIGHT))
    winner, pace = _race(weights, ids, key)
    if floor >= HEAD_WEIGHT:
        return winner
    tail = (weights < HEAD_WEIGHT) & (weights >= floor)
    tail_pace = (weights * tail).sum() / _exponential(key, _TAIL_ID)[0]
    return _race(weights, np.flatnonzero(tail & (weights > 0)), key)[0] if tail_pace > pace else winner


def row_key(seed: int, choice: int, position: int) -> tuple[int, int]:
    """The two words of `randomness.keys`; the seed is taken modulo 2^64."""
    first = _mix((seed & _MASK) ^ 0x243F6A88)
    last = _mix(position + _mix(choice + _mix((seed >> 32 & _MASK) + first)))
    return last, _mix(last + first + 0x85A308D3)


def uniform(key: tuple[int, int], ids: UintArray) -> FloatArray:
    """The numbers of `randomness.uniform`."""
    hashed: UintArray = _mix(_mix(ids * 0x9E3779B1 + key[0]) ^ key[1])
    return ((hashed >> 9).astype(np.float32) + np.float32(0.5)) * np.float32(2.0**-23)


def _weights(logits: FloatArray, temperature: float) -> FloatArray:
    logits -= logits.max()
    with np.errstate(over="ignore"):  # far below the best it is -inf, whose weight is 0
        logits /= np.float32(temperature)
    return np.exp(logits, out=logits)


def _floor(weights: FloatArray, top_k: int, top_p: float) -> float:
    """The smallest weight that top-k and top-p leave; the long tail is sorted only where the head doesn't tell."""
    size = len(weights)
    most = min(top_k, size) if top_k > 0 else size
    if most == size and top_p >= 1:
        return 0.0
    best = _descending(weights[weights >= HEAD_WEIGHT])[:most]
    if most < size:
        best = best if len(best) == most else _descending(weights)[:most]
        return float(best[_reaching(best, top_p, best.sum())])
    total = weights.sum()
    last = _reaching(best, top_p, total)
    if last == len(best) - 1:
        best = _descending(weights)
        last = _reaching(best, top_p, total)
    return float(best[last])


def _descending(weights: FloatArray) -> FloatArray:
    return np.sort(weights)[::-1]


def _reaching(best: FloatArray, top_p: float, total: float) -> int:
    """Which of the best is the last that top-p leaves: those before it don't reach its share yet."""
    if top_p >= 1:
        return len(best) - 1
    before = best.cumsum(dtype=np.float64) - best
    return max(int(np.count_nonzero(before < np.float32(top_p) * total)), 1) - 1


def _race(weights: FloatArray, ids: IdArray, key: tuple[int, int]) -> tuple[int, float]:
    paces = weights[ids] / _exponential(key, ids.astype(np.uint32))
    first = int(paces.argmax())
    return int(ids[first]), float(paces[first])


def _exponential(key: tuple[int, int], ids: UintArray) -> FloatArray:
    return -np.log(uniform(key, ids))


def _mix(x: Any) -> Any:
    """On Python's integers, or on arrays of uint32."""
    x = x & _MASK
    x = (x ^ (x >> 16)) * 0x21F0AAAD & _MASK
    x = (x ^ (x >> 15)) * 0x735A2D97 & _MASK
    return x ^ (x >> 15)
