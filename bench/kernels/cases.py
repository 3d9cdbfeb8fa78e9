"""What is timed: each kernel at a size that fills a GPU, what it moves or computes, and what it is compared with."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.nn import functional

from bench.kernels import installed
from kernels.add_rms_norm import add_rms_norm
from kernels.ops import reference_ops
from kernels.paged_attention import Span
from kernels.rms_norm import rms_norm
from kernels.rotary_kv_write import rotary_kv_write
from kernels.sampling.on_device import best_of, draw_on_device
from kernels.sampling.options import DrawOptions
from kernels.silu_mul import silu_mul
from kernels.triton_ops import triton_ops

Tensor = torch.Tensor
Run = Callable[[], object]

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Of the cases; the defaults are those of a model with 8 billion parameters."""

    rows: int = 8192
    columns: int = 4096
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    decodes: int = 64
    decode_positions: int = 4096
    prompt: int = 8192
    draws: int = 256
    vocab_size: int = 131072


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One kernel against others. Its limit is the copy bandwidth (`moved` bytes) or the matmul rate (`computed` flop).

    `goal` is a share of that limit, `goal_us` a time.
    """

    name: str
    ours: Run
    others: dict[str, Run]
    moved: int = 0
    computed: int = 0
    goal: float | None = None
    goal_us: float | None = None


def cases(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    """One after the other, so that only one's tensors are held."""
    yield from _elementwise(sizes, device)
    yield _decode(sizes, device)
    yield _prefill(sizes, device)
    yield _sampling(sizes, device)


def _elementwise(sizes: Sizes, device: torch.device) -> Iterator[Case]:
    ops, (rows, columns) = triton_ops(), (sizes.rows, sizes.columns)
    x, residual = torch.randn(2, rows, columns, dtype=torch.bfloat16, device=device)
    weight = torch.randn(columns, dtype=torch.bfloat16, device=device)
    shape = f"{rows}×{columns} bf16"

    def case(name: str, moved: int, ours: Callable[..., object], reference: Callable[..., object], *given: Any) -> Case:
        others: dict[str, Run] = {"PyTorch": partial(reference, *given)}
        if device.type == "cuda":
            others["compiled"] = partial(torch.compile(reference), *given)
        return Case(name=f"{name} {shape}", ours=partial(ours, *given), others=others, moved=moved, goal=0.85)

    yield case("rms_norm", 2 * x.nbytes, ops.rms_norm, rms_norm, x, weight, 1e-5)
    yield case("add_rms_norm", 4 * x.nbytes, ops.add_rms_norm, add_rms_norm, x, residual, weight, 1e-5)
    yield case("silu_mul", x.nbytes * 3 // 2, ops.silu_mul, silu_mul, x)
    heads, kv_heads, head_dim = sizes.heads, sizes.kv_heads, sizes.head_dim
    joined = torch.randn(rows, heads + 2 * kv_heads, head_dim, dtype=torch.bfloat16, device=device)
    cos, sin = torch.randn(2, rows, head_dim, dtype=torch.bfloat16, device=device)
    caches = torch.zeros(2, -(-rows // BLOCK_SIZE), BLOCK_SIZE, kv_heads, head_dim, dtype=torch.bfloat16, device=device)
    parts = joined[:, :heads], joined[:, heads:-kv_heads], joined[:, -kv_heads:]
    slots = torch.randperm(rows, device=device)
    moved = 2 * joined.nbytes + rows * kv_heads * head_dim * 2 + cos.nbytes + sin.nbytes
    given = (*parts, cos, sin, caches[0], caches[1], slots)
    yield case("rotary_kv_write", moved, ops.rotary_kv_write, rotary_kv_write, *given)


def _decode(sizes: Sizes, device: torch.device) -> Case:
    sequences, positions = sizes.decodes, sizes.decode_positions
    per_sequence = -(-positions // BLOCK_SIZE)
    order = torch.randperm(sequences * per_sequence).view(sequences, per_sequence)
    spans = [Span(positions - 1, 1, blocks) for blocks in order.tolist()]
    query, keys, values, caches = _step(sizes, sequences, sequences * per_sequence, device)

    def run(ops: Any) -> Run:
        plan = ops.plan_attention(spans, BLOCK_SIZE, device)
        return lambda: ops.attention(query, keys, values, *caches, plan)

    others = {"PyTorch (SDPA)": run(reference_ops())}
    others |= installed.decodes(query, caches, order.to(device=device, dtype=torch.int32), positions)
    name = f"decode attention {sequences} × {positions}, {sizes.heads}/{sizes.kv_heads} heads of {sizes.head_dim}"
    moved = 2 * sequences * positions * sizes.kv_heads * sizes.head_dim * 2
    return Case(name=name, ours=run(triton_ops()), others=others, moved=moved, goal=0.85)


def _prefill(sizes: Sizes, device: torch.device) -> Case:
    rows, blocks = sizes.prompt, -(-sizes.prompt // BLOCK_SIZE)
    query, keys, values, caches = _step(sizes, rows, blocks, device)
    ops, order = triton_ops(), torch.randperm(blocks).tolist()
    plan = ops.plan_attention([Span(0, rows, order)], BLOCK_SIZE, device)
    for cache, new in zip(caches, (keys, values), strict=True):
        cache.flatten(0, 1)[plan.slots.long()] = new

    def sdpa() -> Tensor:
        asked, known, given = (part.transpose(0, 1).unsqueeze(0) for part in (query, keys, values))
        return functional.scaled_dot_product_attention(asked, known, given, is_causal=True, enable_gqa=True)

    name = f"prefill attention {rows}, {sizes.heads}/{sizes.kv_heads} heads of {sizes.head_dim}"
    return Case(
        name=name,
        ours=lambda: ops.attention(query, keys, values, caches[0], caches[1], plan),
        others={"PyTorch (SDPA)": sdpa} | installed.prefills(query, keys, values),
        computed=2 * rows * rows * sizes.heads * sizes.head_dim,  # two products, half of each is masked
        goal=0.6,
    )


def _step(sizes: Sizes, rows: int, blocks: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Query, keys, values of a step, and both caches."""

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, sizes.head_dim, dtype=torch.bfloat16, device=device)

    keys, values = random(2, rows, sizes.kv_heads)
    return random(rows, sizes.heads), keys, values, random(2, blocks, BLOCK_SIZE, sizes.kv_heads)


def _sampling(sizes: Sizes, device: torch.device) -> Case:
    rows, vocab_size = sizes.draws, sizes.vocab_size
    logits = torch.randn(rows, vocab_size, device=device) * 3
    ones = torch.ones(rows, device=device)
    options = DrawOptions(
        temperature=ones * 0.8,
        top_k=ones.int() * 50,
        top_p=ones * 0.9,
        min_p=ones * 0,
        keys=torch.randint(-(2**31), 2**31, (rows, 2), dtype=torch.int32, device=device),
    )
    counts, no_counts = torch.zeros(1, vocab_size, dtype=torch.int32, device=device), -ones.int()

    def ours() -> Tensor:
        return draw_on_device(logits, best_of(logits), options, counts, no_counts, truncates=True)

    def by_topk() -> Tensor:
        values, ids = logits.topk(50, dim=1)
        weights = (values / 0.8).softmax(1)
        kept = weights * (weights.cumsum(1) - weights < 0.9)
        return ids.gather(1, kept.multinomial(1))

    return Case(
        name=f"sampling {rows} × {vocab_size}, top-k 50, top-p 0.9",
        ours=ours,
        others={"PyTorch (topk)": by_topk},
        moved=logits.nbytes,
        goal_us=300.0,
    )
