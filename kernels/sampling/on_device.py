"""Launches the sampling kernels; none of these waits for the device."""

from __future__ import annotations

import torch
import triton

from kernels.sampling.kernel import (
    adjust_kernel,
    best_kernel,
    bias_kernel,
    candidates_kernel,
    floor_kernel,
    race_kernel,
)
from kernels.sampling.options import Best, Bias, DrawOptions, Penalties

CAPACITY = 2048
"""Of a row's candidates; a row whose top-k or top-p reaches beyond is read whole for each halving."""

TILE = 4096
CANDIDATE_TILE = 2048  # these two spill registers with more
FLOOR_TILE = 1024
WARPS = 8


def best_of(logits: torch.Tensor) -> Best:
    """Of logits (rows, vocab_size), fp32, bf16 or fp16, with contiguous columns."""
    rows, vocab_size = logits.shape
    best, log_totals = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(2))
    ids = torch.empty(rows, dtype=torch.int32, device=logits.device)
    if rows:
        tile = _tile(vocab_size)
        best_kernel[(rows,)](logits, best, ids, log_totals, vocab_size, logits.stride(0), TILE=tile, num_warps=WARPS)
    return Best(best, ids, log_totals)


def penalise(logits: torch.Tensor, penalties: Penalties) -> None:
    """Applies penalties and masks to fp32 logits, in place."""
    changed, vocab_size = len(penalties.rows), logits.shape[1]
    _check_logits(logits)
    if penalties.counts.shape[1] != vocab_size or penalties.masks.shape[1] * 32 < vocab_size:
        raise ValueError(
            f"counts {tuple(penalties.counts.shape)} or masks {tuple(penalties.masks.shape)} don't fit {vocab_size} ids"
        )
    if changed:
        tile = min(_tile(vocab_size), 1024)
        adjust_kernel[(changed, triton.cdiv(vocab_size, tile))](
            logits,
            penalties.rows,
            penalties.counts,
            penalties.count_rows,
            penalties.repetition,
            penalties.frequency,
            penalties.presence,
            penalties.masks,
            penalties.mask_rows,
            vocab_size,
            penalties.masks.shape[1],
            logits.stride(0),
            TILE=tile,
            num_warps=4,
        )


def add_bias(logits: torch.Tensor, bias: Bias) -> None:
    """Adds to single logits, fp32, in place."""
    _check_logits(logits)
    entries = len(bias.rows)
    if entries:
        bias_kernel[(triton.cdiv(entries, 128),)](
            logits, bias.rows, bias.ids, bias.values, entries, logits.stride(0), TILE=128, num_warps=4
        )


def draw_on_device(
    logits: torch.Tensor,
    best: Best,
    options: DrawOptions,
    counts: torch.Tensor,
    count_rows: torch.Tensor,
    *,
    truncates: bool,
    capacity: int = CAPACITY,
) -> torch.Tensor:
    """Ids (rows,), int32, of logits (rows, vocab_size) whose `best` is known; each is counted in its row of `counts`.

    `truncates` says whether any row sets top_k, top_p or min_p. A row with no finite logit gives an id that means
    nothing; `best` tells which those are.
    """
    rows, vocab_size = logits.shape
    if len(options.temperature) != rows or options.keys.shape != (rows, 2) or len(count_rows) != rows:
        raise ValueError(f"options for {len(options.temperature)} rows, logits of {rows}")
    tokens = torch.empty(rows, dtype=torch.int32, device=logits.device)
    if not rows:
        return tokens
    floors = _floors(logits, best, options, capacity) if truncates else options.min_p
    race_kernel[(rows,)](
        logits,
        best.logits,
        best.ids,
        options.temperature,
        floors,
        options.keys,
        counts,
        count_rows,
        tokens,
        vocab_size,
        logits.stride(0),
        TILE=_tile(vocab_size),
        num_warps=WARPS,
    )
    return tokens


def _floors(logits: torch.Tensor, best: Best, options: DrawOptions, capacity: int) -> torch.Tensor:
    rows, vocab_size = logits.shape
    candidates = torch.empty(rows, capacity, dtype=torch.float32, device=logits.device)
    found = torch.empty(rows, dtype=torch.int32, device=logits.device)
    totals, floors = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(2))
    shared = logits, best.logits, options.temperature, options.top_k, options.top_p
    candidates_kernel[(rows,)](
        *shared,
        candidates,
        found,
        totals,
        vocab_size,
        logits.stride(0),
        CAPACITY=capacity,
        TILE=min(_tile(vocab_size), CANDIDATE_TILE),
        num_warps=WARPS,
    )
    floor_kernel[(rows,)](
        *shared,
        options.min_p,
        candidates,
        found,
        totals,
        floors,
        vocab_size,
        logits.stride(0),
        CAPACITY=capacity,
        TILE=min(_tile(vocab_size), FLOOR_TILE),
        num_warps=WARPS,
    )
    return floors


def _tile(vocab_size: int) -> int:
    return min(int(triton.next_power_of_2(vocab_size)), TILE)


def _check_logits(logits: torch.Tensor) -> None:
    if logits.dtype != torch.float32 or logits.stride(1) != 1:
        raise ValueError(f"logits are {logits.dtype} with stride {logits.stride()}; changed are fp32 rows only")
