"""How much sooner the first token comes when a prompt's first 512 tokens are known: the aim is five times.

    python -m bench.serving.prefix_hit [--prefix 512] [--own 32] [--rounds 5] [--flags "…"]

Each round asks twice with a prefix of its own, one after the other on an otherwise idle stack: first it is new, then it
is known and another text follows it. Medians over gRPC.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path
from statistics import median

from bench.services_under_test import running
from bench.serving.prompts import Prompts
from cli.model_source import model_directory
from tailrace.client import Client, Completed, Delta

AIM = 5.0


def main() -> int:
    """Prints both times and their ratio; exit code 1 below the aim."""
    parser = argparse.ArgumentParser(prog="python -m bench.serving.prefix_hit")
    parser.add_argument("--prefix", type=int, default=512, help="tokens that are known the second time (512)")
    parser.add_argument("--own", type=int, default=32, help="tokens after them, new each time (32)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--flags", default="", help="flags for our scheduler, in one string")
    options = parser.parse_args()
    return asyncio.run(_measure(options, model_directory(None)))


async def _measure(options: argparse.Namespace, model: Path) -> int:
    prompts = Prompts(model, seed=int(time.time()))
    new, known, cached = [], [], 0
    async with running(model, *options.flags.split(), fake_engine=False) as stack, Client(stack.grpc) as client:
        await _ttft_s(client, prompts.text(options.prefix))  # what a first request pays, whatever it asks
        for _ in range(options.rounds):
            prefix = prompts.text(options.prefix)
            new.append((await _ttft_s(client, f"{prefix}\n{prompts.text(options.own)}"))[0])
            taken_s, cached = await _ttft_s(client, f"{prefix}\n{prompts.text(options.own)}")
            known.append(taken_s)
    ratio = median(new) / median(known)
    print(
        f"TTFT of {options.prefix} + {options.own} tokens: new {median(new) * 1000:.1f} ms, {cached} of them known ",
        end="",
    )
    print(f"{median(known) * 1000:.1f} ms: {ratio:.1f} times sooner (aim: {AIM:g})")
    return 0 if ratio >= AIM else 1


async def _ttft_s(client: Client, prompt: str) -> tuple[float, int]:
    """And how many of the prompt's tokens were known."""
    sent_at, first_at, cached = time.perf_counter(), 0.0, 0
    async for event in client.generate(prompt, max_tokens=2, temperature=0.0, ignore_eos=True):
        if isinstance(event, Delta) and not first_at:
            first_at = time.perf_counter()
        elif isinstance(event, Completed):
            cached = event.usage.cached_prompt_tokens
    return first_at - sent_at, cached


if __name__ == "__main__":
    sys.exit(main())
