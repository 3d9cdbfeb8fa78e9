"""What a long prompt costs the streams beside it: the aim is at most the time of one chunk more at their p99 ITL.

    python -m bench.serving.long_prompt [--streams 16] [--tokens 2048] [--rounds 3] [--flags "…"]

The same streams decode twice in each round: by themselves, and with the prompt arriving in their midst. A chunk's time
is that of the last one, which attends to all before it: the TTFT of a prompt of which all else is known. Medians over
gRPC.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median

import numpy as np

from bench.services_under_test import running
from bench.serving.prompts import Prompts
from cli.model_source import model_directory
from services.scheduler.engine.cpu_engine import STEP_TOKENS
from tailrace.client import Client, Delta

SHORT_TOKENS = 64


@dataclass
class Round:
    """Milliseconds: the streams' p99 ITL by themselves and beside the prompt; its TTFT alone and among them.

    `chunk_ms`: the TTFT, alone, of the last chunk.
    """

    quiet_ms: float = 0.0
    beside_ms: float = 0.0
    alone_ms: float = 0.0
    among_ms: float = 0.0
    chunk_ms: float = 0.0


@dataclass
class Streams:
    """When tokens came, of all streams; `midst` is set once each has a quarter of its tokens."""

    quarter: int
    gaps_s: list[float] = field(default_factory=list)
    missing: int = 0
    midst: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self, client: Client, prompt: str, tokens: int) -> None:
        """One of them, to its end."""
        self.missing += 1
        moments: list[float] = []
        async for event in client.generate(prompt, max_tokens=tokens, temperature=0.0, ignore_eos=True):
            if isinstance(event, Delta):
                moments.append(time.perf_counter())
                if len(moments) == self.quarter:
                    self._arrived()
        self.gaps_s += [after - before for before, after in pairwise(moments[self.quarter :])]

    def _arrived(self) -> None:
        self.missing -= 1
        if not self.missing:
            self.midst.set()


def main() -> int:
    """Prints the figures; exit code 1 when the prompt costs more than a chunk."""
    parser = argparse.ArgumentParser(prog="python -m bench.serving.long_prompt")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=2048, help="length of the long prompt (2048)")
    parser.add_argument("--output", type=int, default=200, help="tokens of each stream (200)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--flags", default="", help="flags for our scheduler, in one string")
    options = parser.parse_args()
    return asyncio.run(_measure(options, model_directory(None)))


async def _measure(options: argparse.Namespace, model: Path) -> int:
    prompts = Prompts(model, seed=int(time.time()))
    flags = options.flags.split()
    chunk = _step_tokens(flags) - options.streams
    async with running(model, *flags, fake_engine=False) as stack, Client(stack.grpc) as client:
        rounds = [await _round(client, prompts, options, chunk) for _ in range(options.rounds)]
    middle = Round(*(median(values) for values in zip(*(vars(one).values() for one in rounds), strict=True)))
    cost_ms = middle.beside_ms - middle.quiet_ms
    print(
        f"{options.streams} streams, ITL p99: {middle.quiet_ms:.0f} ms; beside a prompt of {options.tokens}: ", end=""
    )
    print(f"{middle.beside_ms:.0f} ms, {cost_ms:.0f} more; its last chunk takes {middle.chunk_ms:.0f} ms")
    print(f"the prompt's TTFT: {middle.alone_ms:.0f} ms alone, {middle.among_ms:.0f} ms among the streams")
    return 0 if cost_ms <= middle.chunk_ms else 1


async def _round(client: Client, prompts: Prompts, options: argparse.Namespace, chunk: int) -> Round:
    result = Round(alone_ms=await _ttft_ms(client, prompts.text(options.tokens)))
    known = prompts.text(options.tokens - chunk)
    await _ttft_ms(client, known)
    result.chunk_ms = await _ttft_ms(client, f"{known} {prompts.text(chunk)}")
    for disturbed in (False, True):
        streams = Streams(options.output // 4)
        async with asyncio.TaskGroup() as tasks:
            for _ in range(options.streams):
                tasks.create_task(streams.run(client, prompts.text(SHORT_TOKENS), options.output))
            if disturbed:
                long = prompts.text(options.tokens)
                await streams.midst.wait()
                result.among_ms = await _ttft_ms(client, long)
        p99_ms = float(np.percentile(streams.gaps_s, 99)) * 1000
        if disturbed:
            result.beside_ms = p99_ms
        else:
            result.quiet_ms = p99_ms
    return result


async def _ttft_ms(client: Client, prompt: str) -> float:
    sent_at = time.perf_counter()
    await client.generate(prompt, max_tokens=1, temperature=0.0).text()
    return (time.perf_counter() - sent_at) * 1000


def _step_tokens(flags: list[str]) -> int:
    asked = [int(after) for flag, after in pairwise(flags) if flag == "--max-step-tokens"]
    return asked[-1] if asked else STEP_TOKENS


if __name__ == "__main__":
    sys.exit(main())
