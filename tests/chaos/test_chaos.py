"""The short form of `make chaos`: each service killed once, with a dozen callers over gRPC and SSE."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.fault import Kind
from tests.chaos.plan import Plan
from tests.chaos.run import run


@pytest.mark.parametrize(
    "kinds", [(Kind.KILL,), pytest.param((Kind.STOP,), marks=pytest.mark.slow)], ids=["kill", "stop"]
)
async def test_every_service_may_be_struck_in_mid_stream_and_every_answer_is_the_same(
    model_directory: Path, tmp_path: Path, kinds: tuple[Kind, ...]
) -> None:
    plan = Plan(rounds=1, streams=12, max_tokens=300, kinds=kinds)
    report = await run(plan, tmp_path, lambda **_: None)
    assert report.problems == []
    assert report.identical == report.completed == plan.streams
    assert set(report.left_behind.values()) == {0}
