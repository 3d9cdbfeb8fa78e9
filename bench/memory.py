"""Where memory goes: what each process has in use after its start, after structured output, and with a full KV cache.

    python -m bench.memory [--tokens 32768] [--flags "…"]

MB of 10⁶ bytes, of the real engine with the embedded model. RSS, as in `bench.peers`, counts what several processes
share in each of them; PSS counts to each its share.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Mapping

import psutil

from bench.machine import machine
from bench.services_under_test import running
from bench.serving.loads import Ask
from bench.serving.prompts import Prompts
from bench.serving.targets import HttpTarget
from cli.model_source import model_directory

SCHEMA = '{"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}'
PROMPT_TOKENS = 512
AT_ONCE = 8


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(prog="python -m bench.memory")
    parser.add_argument("--tokens", type=int, default=32768, help="of all prompts together (32768: a full cache)")
    parser.add_argument("--flags", default="", help="flags for our scheduler, in one string")
    options = parser.parse_args()
    print(machine())
    asyncio.run(_measure(options.tokens, options.flags.split()))


async def _measure(tokens: int, flags: list[str]) -> None:
    model = model_directory(None)
    prompts = Prompts(model, seed=1)
    async with running(model, *flags, fake_engine=False) as stack:
        print(f"{'':24}" + "".join(f"{name:>14}" for name in (*stack.pids, "all")))
        _print("started", stack.pids)
        async with HttpTarget(f"http://{stack.http}", stack.model) as target:
            await target.ask(Ask(prompts.text(32), 16, SCHEMA))
            _print("a JSON schema", stack.pids)
            left = [Ask(prompts.text(PROMPT_TOKENS), 1) for _ in range(tokens // PROMPT_TOKENS)]
            while left:
                await asyncio.gather(*map(target.ask, left[:AT_ONCE]))
                del left[:AT_ONCE]
            _print("the cache is full", stack.pids)


def _print(moment: str, pids: Mapping[str, int]) -> None:
    used = [psutil.Process(pid).memory_full_info() for pid in pids.values()]
    for kind in ("rss", "pss"):
        sizes = [getattr(one, kind) / 1e6 for one in used]
        print(f"{moment:18}{kind.upper():>6}" + "".join(f"{size:14.0f}" for size in (*sizes, sum(sizes))), flush=True)


if __name__ == "__main__":
    main()
