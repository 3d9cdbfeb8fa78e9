"""Which forms of each Triton kernel are compiled ahead of time: the shapes of models that people serve."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import triton

from kernels.add_rms_norm.kernel import add_rms_norm_kernel
from kernels.paged_attention.decode_kernel import decode_kernel, decode_tile, join_kernel
from kernels.paged_attention.prefill_kernel import prefill_kernel, prefill_tile
from kernels.rms_norm.kernel import rms_norm_kernel, row_tile
from kernels.rotary_kv_write.kernel import rotary_kv_write_kernel
from kernels.sampling.kernel import (
    adjust_kernel,
    best_kernel,
    bias_kernel,
    candidates_kernel,
    floor_kernel,
    race_kernel,
)
from kernels.sampling.on_device import CANDIDATE_TILE, CAPACITY, FLOOR_TILE, TILE, WARPS
from kernels.silu_mul.kernel import gate_mul_kernel

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
BLOCK_SIZE = 16


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A kernel with the types of its arguments and its constants; what isn't named in `types` is an i32."""

    kernel: Any
    label: str
    types: Mapping[str, str]
    constants: Mapping[str, Any]
    warps: int
    stages: int = 3
    since: int = 80  # the compute capability that it needs
    whole: frozenset[str] = field(default_factory=frozenset)  # numbers that are multiples of 16

    @property
    def name(self) -> str:
        """The kernel's own name and what sets this variant apart."""
        return f"{self.kernel.fn.__name__.removesuffix('_kernel')} {self.label}"

    @property
    def signature(self) -> dict[str, str]:
        """The type of every argument, in the kernel's order."""
        return {
            name: "constexpr" if name in self.constants else self.types.get(name, "i32")
            for name in self.kernel.arg_names
        }


def variants() -> Iterator[Variant]:
    """All of them: every kernel in every dtype, and in bf16, which GPUs serve in, in every shape."""
    for dtype in DTYPES:
        yield from _norms(dtype, 4096)
        yield _gate(dtype, gelu=False)
        yield _rotary(dtype, dtype)
        yield _decode(dtype, dtype, 128, 4, splits=1)
        yield _prefill(dtype, dtype, 128, 4)
        yield _join(dtype)
        yield _best(dtype)
    yield from _norms("bf16", 64)
    yield from _norms("bf16", 16384)
    yield _gate("bf16", gelu=True)
    for head_dim, group in ((64, 3), (256, 2)):
        yield _decode("bf16", "bf16", head_dim, group, splits=1)
        yield _prefill("bf16", "bf16", head_dim, group)
    yield _decode("bf16", "bf16", 128, 8, splits=16)
    yield _decode("bf16", "bf16", 256, 2, splits=1, window=True, softcap=True)
    yield _prefill("bf16", "bf16", 256, 2, window=True, softcap=True)
    yield _decode("bf16", "bf16", 80, 1, splits=1)
    yield _prefill("bf16", "bf16", 96, 1)
    yield _rotary("bf16", "fp8")
    yield _decode("bf16", "fp8", 128, 4, splits=1)
    yield _prefill("bf16", "fp8", 128, 4)
    yield from _draws()


def _norms(dtype: str, columns: int) -> Iterator[Variant]:
    tile, warps = row_tile(columns)
    shared: dict[str, Any] = {"label": f"{dtype} {columns}", "constants": tile, "warps": warps}
    whole = frozenset({"columns", "x_stride", "out_stride", "residual_stride"})
    types = {"eps": "fp32"} | dict.fromkeys(("x", "residual", "weight", "out", "normed", "total"), f"*{dtype}")
    yield Variant(kernel=rms_norm_kernel, types=types, whole=whole, **shared)
    yield Variant(kernel=add_rms_norm_kernel, types=types, whole=whole, **shared)


def _gate(dtype: str, *, gelu: bool) -> Variant:
    return Variant(
        kernel=gate_mul_kernel,
        label=f"{dtype} {'gelu' if gelu else 'silu'}",
        types={"gate_up": f"*{dtype}", "out": f"*{dtype}"},
        constants={"GELU": gelu, "COLUMNS": 1024},
        warps=4,
        whole=frozenset({"columns", "in_stride", "out_stride"}),
    )


def _rotary(dtype: str, cache: str) -> Variant:
    pointers = dict.fromkeys(("query", "keys", "values", "cos", "sin", "query_out", "keys_out"), f"*{dtype}")
    return Variant(
        kernel=rotary_kv_write_kernel,
        label=_label(dtype, cache, "128"),
        types=pointers | _caches(cache) | {"slots": "*i32"},
        constants={"HEAD_DIM": 128, "HALF": 64, "HEADS": 16},
        warps=4,
        since=_since(cache),
        whole=frozenset({"query_stride", "key_stride", "value_stride", "angle_stride"}),
    )


def _decode(
    dtype: str, cache: str, head_dim: int, group: int, *, splits: int, window: bool = False, softcap: bool = False
) -> Variant:
    padded = triton.next_power_of_2(head_dim)
    return Variant(
        kernel=decode_kernel,
        label=_label(dtype, cache, f"{head_dim}×{group}", splits, window, softcap),
        types=_attention_types(dtype, cache) | {"parts": "*fp32", "part_weights": "*fp32"},
        constants={
            "GROUP": group,
            "PADDED_GROUP": 16,
            "TILE": decode_tile(padded, DTYPES[dtype]),
            "SPLITS": splits,
            **_attention_constants(head_dim, window, softcap),
        },
        warps=4,
        stages=2,
        since=_since(cache),
    )


def _prefill(
    dtype: str, cache: str, head_dim: int, group: int, *, window: bool = False, softcap: bool = False
) -> Variant:
    rows, tile, warps = prefill_tile(group, triton.next_power_of_2(head_dim), DTYPES[dtype])
    return Variant(
        kernel=prefill_kernel,
        label=_label(dtype, cache, f"{head_dim}×{group}", 1, window, softcap),
        types=_attention_types(dtype, cache) | {"row_sums": "*i32"},
        constants={
            "GROUP": group,
            "BLOCK": rows // group,
            "ROWS": rows,
            "TILE": tile,
            **_attention_constants(head_dim, window, softcap),
        },
        warps=warps,
        stages=2,
        since=_since(cache),
    )


def _join(dtype: str) -> Variant:
    return Variant(
        kernel=join_kernel,
        label=f"{dtype} 128",
        types={"parts": "*fp32", "part_weights": "*fp32", "first_rows": "*i32", "out": f"*{dtype}"},
        constants={"HEAD_DIM": 128, "PADDED_DIM": 128, "SPLITS": 16},
        warps=2,
    )


def _best(dtype: str) -> Variant:
    types = {"logits": f"*{dtype}", "best": "*fp32", "best_ids": "*i32", "log_totals": "*fp32"}
    return _sampling(best_kernel, types, label=dtype, TILE=TILE)


def _draws() -> Iterator[Variant]:
    floats = ("logits", "best", "temperatures", "top_p", "min_p", "candidates", "totals", "floors", "values")
    factors = ("repetition", "frequency", "presence")
    numbers = ("best_ids", "top_k", "candidate_counts", "keys", "counts", "count_rows", "tokens", "rows", "ids")
    types = dict.fromkeys((*floats, *factors), "*fp32") | dict.fromkeys((*numbers, "masks", "mask_rows"), "*i32")
    yield _sampling(adjust_kernel, types, warps=4, TILE=1024)
    yield _sampling(bias_kernel, types, warps=4, TILE=128)
    yield _sampling(candidates_kernel, types, CAPACITY=CAPACITY, TILE=CANDIDATE_TILE)
    yield _sampling(floor_kernel, types, CAPACITY=CAPACITY, TILE=FLOOR_TILE)
    yield _sampling(race_kernel, types, TILE=TILE)


def _sampling(
    kernel: Any, types: Mapping[str, str], *, label: str = "fp32", warps: int = WARPS, **sizes: int
) -> Variant:
    whole = frozenset({"vocab_size", "stride"})
    return Variant(kernel=kernel, label=label, types=types, constants=sizes, warps=warps, whole=whole)


def _attention_types(dtype: str, cache: str) -> dict[str, str]:
    numbers = dict.fromkeys(("first_rows", "lengths", "tables"), "*i32") | {"scale": "fp32", "softcap": "fp32"}
    return {"query": f"*{dtype}", "out": f"*{dtype}"} | _caches(cache) | numbers


def _attention_constants(head_dim: int, window: bool, softcap: bool) -> dict[str, Any]:
    return {
        "HEAD_DIM": head_dim,
        "PADDED_DIM": triton.next_power_of_2(head_dim),
        "BLOCK_SIZE": BLOCK_SIZE,
        "WINDOW": window,
        "SOFTCAP": softcap,
        "WIDEN": False,
    }


def _caches(cache: str) -> dict[str, str]:
    return dict.fromkeys(("key_cache", "value_cache"), "*fp8e4nv" if cache == "fp8" else f"*{cache}")


def _since(cache: str) -> int:
    return 89 if cache == "fp8" else 80


def _label(dtype: str, cache: str, shape: str, splits: int = 1, window: bool = False, softcap: bool = False) -> str:
    parts = [dtype if cache == dtype else f"{dtype}, {cache} cache", shape]
    parts += [f"{splits} splits"] if splits > 1 else []
    return " ".join(parts + ["window"] * window + ["soft cap"] * softcap)
