"""Random numbers without a generator: each is a hash of where it is used, so that no neighbour can change it.

The number for candidate `id` at output position `position` of choice `choice` is

    k0, k1 = key(seed, choice, position)
    u      = ((mix(mix(id * 0x9E3779B1 + k0) ^ k1) >> 9) + 0.5) * 2^-23          strictly between 0 and 1

    key: a = mix(seed_low ^ 0x243F6A88), b = mix(seed_high + a), c = mix(choice + b), d = mix(position + c)
         k0 = d, k1 = mix(d + a + 0x85A308D3)
    mix: x ^= x >> 16; x *= 0x21F0AAAD; x ^= x >> 15; x *= 0x735A2D97; x ^= x >> 15

All arithmetic is modulo 2^32, so a GPU kernel computes the same with 32-bit integers; here it is done in 64 and cut.
`mix` is lowbias32 in the variant with constants by TheIronBorn (github.com/skeeto/hash-prospector).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

Tensor = torch.Tensor

_MASK = 0xFFFFFFFF


def keys(seeds: Sequence[int], choices: Sequence[int], positions: Sequence[int]) -> Tensor:
    """Two 32-bit words per row, shape (rows, 2), int64; seeds are taken modulo 2^64."""
    places = zip(seeds, choices, positions, strict=True)
    words = [(seed & _MASK, seed >> 32 & _MASK, choice, position) for seed, choice, position in places]
    low, high, choice, position = torch.tensor(words, dtype=torch.int64).view(-1, 4).unbind(1)
    first = _mix(low ^ 0x243F6A88)
    last = _mix(position + _mix(choice + _mix(high + first)))
    return torch.stack((last, _mix(last + first + 0x85A308D3)), dim=1)


def uniform(row_keys: Tensor, ids: Tensor) -> Tensor:
    """Numbers in (0, 1), fp32, for int64 `ids` under keys (…, 2) that broadcast against them."""
    hashed = _mix(_mix(ids * 0x9E3779B1 + row_keys[..., 0]) ^ row_keys[..., 1])
    return ((hashed >> 9).float() + 0.5) * 2.0**-23


def _mix(x: Tensor) -> Tensor:
    x = x & _MASK
    x = (x ^ (x >> 16)) * 0x21F0AAAD & _MASK
    x = (x ^ (x >> 15)) * 0x735A2D97 & _MASK
    return x ^ (x >> 15)
