"""What `make bench-kernels` times computes the same on both sides, at sizes that the interpreter manages."""

from __future__ import annotations

import pytest
import torch

from bench.kernels.__main__ import measured, table
from bench.kernels.cases import Case, Sizes, cases
from bench.kernels.device import NO_DEVICE, main

SIZES = Sizes(
    rows=3, columns=64, heads=2, kv_heads=1, head_dim=16, decodes=2, decode_positions=17, prompt=18, draws=1,
    vocab_size=90,
)  # fmt: skip


def test_every_case_runs_and_agrees_with_what_it_is_compared_with(device: torch.device) -> None:
    names = []
    for case in cases(SIZES, device):
        names.append(case.name.split()[0])
        got, (expected, *_) = case.ours(), [run() for run in case.others.values()]
        if case.name.startswith("prefill"):
            assert isinstance(expected, torch.Tensor)
            expected = expected[0].transpose(0, 1)
        if not case.name.startswith("sampling"):  # where both draw, each by its own numbers
            torch.testing.assert_close(got, expected, rtol=0.05, atol=0.05)
    assert names == ["rms_norm", "add_rms_norm", "silu_mul", "rotary_kv_write", "decode", "prefill", "sampling"]


def test_a_goal_is_a_share_of_the_limit_or_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.kernels.__main__.time_us", lambda run: float(run()))
    fast = Case(name="a", ours=lambda: 100, others={"b": lambda: 200}, moved=90, goal=0.85)
    slow = Case(name="c", ours=lambda: 400, others={}, computed=90, goal_us=300.0)
    rows = [measured(case, bandwidth=1e6, rate=1e6) for case in (fast, slow)]
    assert [(row["share"], row["kept"]) for row in rows] == [(0.9, True), (0.225, False)]
    assert table(rows).row_count == 2


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without one")
def test_without_a_device_one_line_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert main() == NO_DEVICE
    told = capsys.readouterr().err
    assert told.startswith("no CUDA device here") and told.count("\n") == 1
