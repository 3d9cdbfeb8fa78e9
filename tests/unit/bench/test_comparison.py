"""What `make bench-peers` promises whatever its peers do: nobody's figures are lost with another's."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import pytest

from bench.serving.comparison import Plan, Results, System, compare
from bench.serving.figures import Objective
from bench.serving.limits import Limits, ModelSize, share_of, size_of
from bench.serving.loads import Ask, Load
from bench.serving.report import ratios_of, rows_of, table_of, ttft_ratios_of
from bench.serving.targets import Heard, Target

SIZE = ModelSize(layers=100, head=20)


class Answering(Target):
    """Two tokens at fixed moments, until it dies."""

    def __init__(self, ttft_s: float, *, dies_after: int = 1_000) -> None:
        self._ttft_s = ttft_s
        self._left = dies_after

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None: ...

    async def ask(self, ask: Ask) -> Heard:
        if not self._left:
            raise OSError("the connection broke")
        self._left -= 1
        return Heard(0.0, [self._ttft_s, self._ttft_s + 0.01], output_tokens=2)


async def compared(systems: list[System], rounds: int) -> tuple[Results, list[str]]:
    failures: list[str] = []
    loads = {name: lambda prompts, rng: Load("", [Ask("x", 2)], streams=1) for name in ("c1", "c32")}
    plan = Plan(loads, rounds, Objective())
    prompts: Any = lambda seed: None  # noqa: E731  # these loads have texts of their own
    return await compare(systems, plan, prompts, lambda *run: None, failures.append), failures


def rows(systems: Sequence[System], results: Results) -> list[dict[str, Any]]:
    limits = Limits(read_gb_per_s=1.0, products_gmac_per_s=0.001)
    return rows_of(systems, results, lambda row, bits: share_of(row, bits, limits, SIZE))


async def test_a_peer_that_dies_keeps_what_it_had_and_the_others_go_on() -> None:
    systems = [
        System("Tailrace HTTP", "int8", Answering(0.1), (), 8.0),
        System("peer", "", Answering(0.2, dies_after=1), ()),
    ]
    results, failures = await compared(systems, rounds=2)
    assert {key: len(runs) for key, runs in results.items()} == {
        ("Tailrace HTTP", "c1"): 2,
        ("Tailrace HTTP", "c32"): 2,
        ("peer", "c1"): 1,
    }
    assert [failure.split(": ")[0] for failure in failures] == ["peer, c32", "peer, c1"]
    told = rows(systems, results)
    assert ratios_of(told, "Tailrace", ["c1", "c32"]) == {"c1": pytest.approx(0.21 / 0.11, abs=0.01), "c32": None}
    assert ttft_ratios_of(told, "Tailrace") == {"c1": 0.5, "c32": None}


async def test_a_row_says_what_it_uses_of_the_limit_that_binds_its_load() -> None:
    systems = [System("Tailrace HTTP", "int8", Answering(0.1), (), 8.0), System("peer", "", Answering(0.1), ())]
    results, _ = await compared(systems, rounds=1)
    shares = {(row["system"], row["load"]): row["of_limit"] for row in rows(systems, results)}
    assert shares["peer", "c1"] is None, "it isn't known how many bits a weight of it has"
    assert shares["Tailrace HTTP", "c1"]["limit"] == "bandwidth"
    assert shares["peer", "c32"]["limit"] == "arithmetic"
    # 120 bytes at 100 tokens/s of 1 GB/s; 220 products at 2 tokens in 0.11 s of a million a second.
    row: dict[str, Any] = {"load": "c1", "tpot_ms": {"p50": 10.0}}
    assert share_of(row, 8e6, Limits(1.0, 1.0), SIZE) == {"limit": "bandwidth", "share": 12.0}
    row = {"load": "c32", "output_tokens_per_s": 1000.0}
    assert share_of(row, None, Limits(1.0, 0.001), SIZE) == {"limit": "arithmetic", "share": 0.22}


def test_tied_embeddings_are_the_head_and_count_once(tmp_path: Path) -> None:
    header = {
        "model.embed_tokens.weight": {"shape": [10, 4]},
        "model.layers.0.mlp.up_proj.weight": {"shape": [8, 4]},
        "model.norm.weight": {"shape": [4]},
    }
    text = json.dumps(header).encode()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    assert size_of(tmp_path) == ModelSize(layers=32, head=40)


async def test_who_could_not_be_measured_stands_below_the_table_with_the_reason() -> None:
    systems = [System("Tailrace HTTP", "int8", Answering(0.1), ())]
    results, _ = await compared(systems, rounds=1)
    assert (
        str(table_of(rows(systems, results), {"vLLM CPU": "needs [more]"}).caption) == "without vLLM CPU: needs [more]"
    )
