"""What this machine's cores can do at most: bandwidth, and products from the first-level cache, by format.

    python -m bench.cpu_limits

The best of several short tries, on one core and on all, so that other work on the machine shows as little as it can.
A decode of one sequence reads every weight once: bandwidth over the model's bytes bounds it. Many rows are bound by the
products. Printed beside the figures of bench.cpu_step, these say what is left.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np

from kernels.cpu import Format, best_kernels, load_library
from kernels.cpu.library import check

TRIES = 7
COPY_BYTES = 64 << 20
ROWS, INPUTS, OUTPUTS, REPEATS = 48, 576, 16, 1000  # one panel of a small model's layer, and a block of rows


def best_rate(work: Callable[[], float], threads: int) -> float:
    """The best total over several tries of `work` on so many threads at once; it returns how much it did."""
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(TRIES):
            started = time.perf_counter()
            done = sum(job.result() for job in [pool.submit(work) for _ in range(threads)])
            best = max(best, done / (time.perf_counter() - started))
    return best


def copies() -> float:
    """Bytes read and written by one copy."""
    source = np.ones(COPY_BYTES // 8)
    target = np.empty_like(source)
    for _ in range(4):
        np.copyto(target, source)
    return 4 * 2.0 * COPY_BYTES


def reads() -> float:
    """Bytes of one array, read for its largest value. Written first: unwritten pages of zeros are all one page."""
    source = np.ones(COPY_BYTES, dtype=np.uint8)
    for _ in range(4):
        source.max()
    return 4.0 * COPY_BYTES


def products(stored: Format) -> float:
    """Multiply-adds of one panel, over and over."""
    x, weight = (np.ones((rows, INPUTS), dtype=np.float32) for rows in (ROWS, OUTPUTS))
    out = np.empty((ROWS, OUTPUTS), dtype=np.float32)
    pointers = (x.ctypes.data, ROWS, weight.ctypes.data, INPUTS, OUTPUTS, out.ctypes.data)
    check(load_library().tailrace_product(b"", stored, *pointers, REPEATS))
    return float(ROWS * INPUTS * OUTPUTS * REPEATS)


def main() -> int:
    """Prints the table."""
    cores = len(os.sched_getaffinity(0))
    print(f"kernels {best_kernels()}, {cores} cores, load average {os.getloadavg()[0]:.1f}")
    print(f"{'':>22}{'one core':>10}{'all':>10}")
    limits: dict[str, Callable[[], float]] = {"copy, GB/s": copies, "read, GB/s": reads}
    limits |= {f"{stored.name.lower()} products, GMAC/s": partial(products, stored) for stored in Format}
    for name, work in limits.items():
        print(f"{name:>22}{best_rate(work, 1) / 1e9:10.1f}{best_rate(work, cores) / 1e9:10.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
