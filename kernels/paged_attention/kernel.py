"""Paged attention in Triton: one launch for a step's prefills, one (or two, when split) for its decodes."""

from __future__ import annotations

import torch

from kernels.paged_attention.decode_kernel import attend_decodes
from kernels.paged_attention.prefill_kernel import attend_prefills
from kernels.paged_attention.reference import Scores
from kernels.paged_attention.tables import TablePlan


def paged_attention_triton(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    plan: TablePlan,
    scores: Scores,
) -> torch.Tensor:
    """Shapes as in `paged_attention`, with a plan by `plan_tables`; keys and values are read from the caches alone.

    fp32, bf16 and fp16, caches in the same or in fp8 (e4m3, from sm_89 on); heads of any size up to 256.
    """
    query = query.contiguous()
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if plan.prefills is not None and plan.row_sums is not None:
        attend_prefills(query, key_cache, value_cache, plan.prefills, plan.row_sums, plan.prefill_rows, scores, out)
    if plan.decodes is not None:
        attend_decodes(query, key_cache, value_cache, plan.decodes, plan.splits, scores, out)
    return out
