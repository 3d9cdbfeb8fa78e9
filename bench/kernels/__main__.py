"""Times every kernel on a CUDA device, beside PyTorch and whatever else is installed, as shares of the device's limits.

    python -m bench.kernels

The limits are measured in the same run: the bandwidth of a large copy, the rate of a large bf16 product. Prints a
table and writes build/bench/kernels.json; exit code 1 when a goal isn't kept, 3 where there is no CUDA device.
"""

from __future__ import annotations

import datetime
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import triton
from rich.console import Console
from rich.table import Table

from bench.kernels import device as cuda
from bench.kernels.cases import Case, Run, Sizes, cases

OUT = Path("build/bench/kernels.json")
_COPY_BYTES = 2**30
_MATMUL = 8192


def main() -> int:
    """Exit code as the module says."""
    if code := cuda.main():
        return code
    device = torch.device("cuda")
    bandwidth, rate = limits(device)
    print(f"copy {bandwidth / 1e9:.0f} GB/s, bf16 product {rate / 1e12:.0f} Tflop/s")
    rows = [measured(case, bandwidth, rate) for case in cases(Sizes(), device)]
    Console().print(table(rows))
    OUT.parent.mkdir(parents=True, exist_ok=True)
    told = {
        "card": torch.cuda.get_device_name(),
        "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        "copy_bytes_per_s": bandwidth,
        "bf16_flop_per_s": rate,
        "rows": rows,
    }
    OUT.write_text(json.dumps(told, indent=1), encoding="utf-8")
    return 0 if all(row["kept"] for row in rows) else 1


def limits(device: torch.device) -> tuple[float, float]:
    """Bytes a second read and written by a copy, and operations a second of a bf16 product."""
    source = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    left, right = torch.randn(2, _MATMUL, _MATMUL, dtype=torch.bfloat16, device=device)
    copy_us, product_us = time_us(lambda: target.copy_(source)), time_us(lambda: left @ right)
    return 2 * _COPY_BYTES / copy_us * 1e6, 2 * _MATMUL**3 / product_us * 1e6


def time_us(run: Run) -> float:
    """The median of many runs, each with a cold cache."""
    return float(triton.testing.do_bench(run, return_mode="median")) * 1e3


def measured(case: Case, bandwidth: float, rate: float) -> dict[str, object]:
    """A row of the table."""
    ours = time_us(case.ours)
    least = (case.moved / bandwidth if case.moved else case.computed / rate) * 1e6
    share = least / ours
    kept = share >= case.goal if case.goal is not None else case.goal_us is None or ours <= case.goal_us
    others = {name: time_us(run) for name, run in case.others.items()}
    goal = f"{case.goal:.0%}" if case.goal is not None else f"{case.goal_us:.0f} µs"
    return {"name": case.name, "us": ours, "share": share, "goal": goal, "kept": kept, "others_us": others}


def table(rows: Sequence[dict[str, object]]) -> Table:
    """What `main` prints."""
    shown = Table("kernel", "µs", "of the limit", "goal", "others, µs", box=None)
    for row in rows:
        others = row["others_us"]
        assert isinstance(others, dict)
        shown.add_row(
            str(row["name"]),
            f"{row['us']:.1f}",
            f"{row['share']:.0%}",
            f"{row['goal']} {'✓' if row['kept'] else '✗'}",
            ", ".join(f"{name} {us:.1f}" for name, us in others.items()),
        )
    return shown


if __name__ == "__main__":
    sys.exit(main())
