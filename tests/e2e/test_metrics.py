"""The metrics of all services after any mix of ends: what was accepted is what ended, and nothing is open."""

from __future__ import annotations

import asyncio
import logging
import shutil
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from prometheus_client import generate_latest

from services.runtime.metrics import FINISH_REASONS
from tailrace.client import Client, ClientError
from tests.stack import FLOW, Stack, in_process_stack

BROKEN_ID = 20


@pytest.fixture
async def stack(model_directory: Path) -> AsyncIterator[Stack]:
    engine = {"fake_bad_output_id": BROKEN_ID, "fake_pace_ms": 2.0, "inference_gateway_names": True}
    async with in_process_stack(model_directory, scheduler=engine) as running:
        yield running


async def every_kind_of_end(client: Client) -> None:
    """By length, stop text, deadline, abort and error; a caller that leaves; a request that is refused."""

    async def leave() -> None:
        async with client.generate("hello", max_tokens=4000, ignore_eos=True) as stream:
            async for _ in stream:
                break

    async def abort() -> None:
        async with client.generate("hello", max_tokens=4000, ignore_eos=True, request_id="aborted") as stream:
            async for _ in stream:
                await client.abort("aborted")

    text = (await client.generate("hello", max_tokens=60, ignore_eos=True, seed=7).whole()).choices[0].text
    stopped = client.generate("hello", max_tokens=4000, ignore_eos=True, seed=7, stop=[text[20:24]])
    results = await asyncio.gather(
        client.generate("hello", max_tokens=30, ignore_eos=True, n=3).whole(),
        stopped.whole(),
        client.generate("hello", max_tokens=4000, ignore_eos=True, timeout_s=0.1).whole(),
        client.generate([BROKEN_ID, 21], max_tokens=30).whole(),
        leave(),
        abort(),
        client.generate("hello", max_tokens=30, temperature=-1.0).whole(),
        return_exceptions=True,
    )
    assert all(isinstance(result, ClientError | None) or hasattr(result, "choices") for result in results), results


def promtool(exposition: bytes) -> tuple[int, bytes]:
    """Its exit code, and all that it says."""
    done = subprocess.run(["promtool", "check", "metrics"], input=exposition, capture_output=True, check=False)
    return done.returncode, done.stdout + done.stderr


async def test_what_was_accepted_is_what_ended_and_nothing_is_open(
    stack: Stack, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "tailrace")
    async with Client(stack.grpc) as client:
        for _ in range(2):
            await every_kind_of_end(client)
        await stack.wait_idle()
    ended = {reason: stack.metric("tokenizer", "requests_total", reason=reason) for reason in FINISH_REASONS}
    assert all(ended.values()), ended
    assert sum(ended.values()) == stack.metric("tokenizer", "accepted_total")
    sequences = [stack.metric("scheduler", "ended_total", reason=reason) for reason in FINISH_REASONS]
    assert sum(sequences) == stack.metric("scheduler", "accepted_total")
    lines = [record for record in caplog.records if record.getMessage() == "request finished"]
    assert len(lines) == sum(ended.values()), "one line per request at its end"
    assert stack.metric("detokenizer", "stop_matches_total") == 2
    for histogram in ("queue_seconds", "prefill_seconds", "decode_seconds"):
        assert stack.metric("scheduler", f"{histogram}_count") > 0
    for histogram in ("acceptance_seconds", "end_to_end_seconds", "time_per_output_token_seconds"):
        assert stack.metric("tokenizer", f"{histogram}_count") > 0


async def test_the_load_is_also_told_under_the_names_of_the_inference_gateway(stack: Stack) -> None:
    registry = stack.services["scheduler"].registry
    model = {"model_name": stack.model}
    for name in ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc"):
        assert registry.get_sample_value(f"vllm:{name}", model) == 0
    names = {family.name for family in registry.collect()}
    assert {"vllm:cache_config_info", "vllm:lora_requests_info"} <= names


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed (Debian: prometheus)")
async def test_promtool_has_nothing_to_say_about_any_service(stack: Stack) -> None:
    async with Client(stack.grpc) as client:
        await every_kind_of_end(client)
    await stack.wait_idle()
    for name in FLOW:
        exposition = b"\n".join(
            line for line in generate_latest(stack.services[name].registry).splitlines() if b"vllm:" not in line
        )
        assert await asyncio.to_thread(promtool, exposition + b"\n") == (0, b""), name
