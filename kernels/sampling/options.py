"""What a step's rows ask of a sampler, as columns on its device."""

from __future__ import annotations

from dataclasses import dataclass

import torch

Tensor = torch.Tensor

PROMPT_COUNT = 1 << 30
"""What a count holds beside the output's number when the id stands in the prompt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawOptions:
    """Columns (rows,): `temperature`, `top_p`, `min_p` fp32, `top_k` int32; 1 / 0 / 0 for off, temperature 0 greedy.

    `keys` (rows, 2) int32 are the bits of `randomness.keys`.
    """

    temperature: Tensor
    top_k: Tensor
    top_p: Tensor
    min_p: Tensor
    keys: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Penalties:
    """For rows[i] of the logits: penalties by the counts in row count_rows[i] of `counts`, and mask mask_rows[i].

    `counts` (slots, vocab_size) int32 holds how often an id stands in the output, plus PROMPT_COUNT if it stands in
    the prompt; `masks` (n, words) int32 a bit for each id that may come, 32 a word, lowest first. A row of -1 is none.
    `rows`, `count_rows` and `mask_rows` are int32, the factors fp32, one per changed row.
    """

    rows: Tensor
    counts: Tensor
    count_rows: Tensor
    repetition: Tensor
    frequency: Tensor
    presence: Tensor
    masks: Tensor
    mask_rows: Tensor


@dataclass(frozen=True, slots=True)
class Bias:
    """values[i] (fp32) is added to logits[rows[i], ids[i]] (int32); -inf forbids."""

    rows: Tensor
    ids: Tensor
    values: Tensor


@dataclass(frozen=True, slots=True)
class Best:
    """Of each row: the largest logit (NaN for a row with NaN or +inf), its first id, and the log of Σ exp."""

    logits: Tensor
    ids: Tensor
    log_totals: Tensor
