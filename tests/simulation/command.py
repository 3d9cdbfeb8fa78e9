"""The command line: one seed with its story, or many over all cores with a bar, a table, and the failures."""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from tests.simulation.occasions import plan_of
from tests.simulation.probes import no_transition_yet
from tests.simulation.report import failure_report, plan_lines, table
from tests.simulation.run import run
from tests.simulation.substitutes import substituted

CHUNK = 20
MOST_REPORTS = 5
BAR = 40
LINE_EVERY = 500


def main(argv: Sequence[str]) -> int:
    """Runs what was asked for; 1 when a promise was broken."""
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.add_argument("--seed", type=int, help="run this one alone")
    parser.add_argument("--trace", action="store_true", help="with its story")
    parser.add_argument("--without", default="", metavar="N,N,…", help="leave out these parts of its plan")
    parser.add_argument("--seeds", type=int, default=1000, help="how many to run")
    parser.add_argument("--from", type=int, default=0, dest="first", help="the first of them")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="processes to run them in")
    asked = parser.parse_args(argv)
    if asked.seed is not None:
        return _one(asked.seed, frozenset(map(int, filter(None, asked.without.split(",")))), tells=asked.trace)
    return _many(range(asked.first, asked.first + asked.seeds), asked.jobs)


def _one(seed: int, without: frozenset[int], *, tells: bool) -> int:
    plan = plan_of(seed).without(without)
    with substituted():
        result = run(plan, tells=tells)
    print(*result.story, *plan_lines(plan), sep="\n")
    print(result.violation or f"every promise was kept, in {result.virtual_s:.1f} virtual seconds")
    return 1 if result.violation else 0


def _many(seeds: range, jobs: int) -> int:
    counts = no_transition_yet()
    failures: dict[int, str] = {}
    started, done = time.monotonic(), 0
    for number, chunk_counts, chunk_failures in run_chunks(seeds, jobs):
        done += number
        counts.update(chunk_counts)
        failures |= chunk_failures
        _show(done, len(seeds), failures, time.monotonic() - started)
    took_s = time.monotonic() - started
    print("\n" + table(counts, len(seeds)))
    print(f"\n{took_s:.0f} s, {took_s * jobs / len(seeds):.3f} s a seed on each of {jobs} processes")
    with substituted():
        for seed in sorted(failures)[:MOST_REPORTS]:
            print(f"\n{failure_report(seed)}")
    print(f"\n{len(failures)} of {len(seeds)} seeds broke a promise" + (f": {sorted(failures)}" if failures else ""))
    return 1 if failures else 0


def run_chunks(seeds: range, jobs: int) -> Iterator[tuple[int, Counter[str], dict[int, str]]]:
    """The seeds in so many processes: of each chunk, as it is done, what `_run_chunk` tells."""
    chunks = [seeds[start : start + CHUNK] for start in range(0, len(seeds), CHUNK)]
    if jobs == 1:
        yield from map(_run_chunk, chunks)
        return
    with multiprocessing.get_context("spawn").Pool(jobs, maxtasksperchild=50) as pool:
        yield from pool.imap_unordered(_run_chunk, chunks)


def _run_chunk(seeds: range) -> tuple[int, Counter[str], dict[int, str]]:
    """How many they are, what they reached, and which broke a promise."""
    counts: Counter[str] = Counter()
    failures: dict[int, str] = {}
    with substituted():
        for seed in seeds:
            result = run(plan_of(seed))
            counts.update(result.counts)
            if result.violation is not None:
                failures[seed] = result.violation
    return len(seeds), counts, failures


def _show(done: int, total: int, failures: Mapping[int, str], took_s: float) -> None:
    if not sys.stderr.isatty():
        if done % LINE_EVERY < CHUNK:
            print(f"{done} of {total} in {took_s:.0f} s, failed: {sorted(failures)}", file=sys.stderr, flush=True)
        return
    filled = BAR * done // total
    left_s = took_s / done * (total - done)
    bar = "█" * filled + "░" * (BAR - filled)
    sys.stderr.write(f"\r{bar} {done}/{total}, {len(failures)} failed, {left_s:.0f} s left  ")
    if done == total:
        sys.stderr.write("\n")
