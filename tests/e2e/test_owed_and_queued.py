"""What real processes owe each other, queue and hold back, named by `tailrace doctor` within seconds.

Here processes are killed and started again, so their graces are short.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc.aio
import pytest
import pytest_asyncio

from cli.diagnosis.finding import Severity
from cli.doctor import examine
from cli.loop import Loop
from cli.stack import free_ports
from tailrace.v1 import admin_pb2, admin_pb2_grpc, scheduler_pb2_grpc
from tests.e2e.wired import Wired, reading, shown, until_found, wired_stack
from tests.integration.scheduler.stand import submit_pb
from tests.killable import Killable

pytestmark = pytest.mark.asyncio(loop_scope="module")

GRACE_S = 6
MAX_RUNNING = 16
MAX_STOP_LENGTH = 1024


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def wired(model_directory: Path) -> AsyncIterator[Wired]:
    scheduler = ("--lease-grace-s", str(GRACE_S), "--max-running", str(MAX_RUNNING))
    async with wired_stack(
        model_directory, scheduler=scheduler, tokenizer=("--gateway-grace-s", str(GRACE_S))
    ) as stack:
        yield stack


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def _recovered(wired: Wired) -> AsyncIterator[None]:
    """Each test finds a healthy stack, and its stall is over before the next one."""
    yield
    await wired.recover()


async def test_a_submit_that_no_scheduler_answers_is_named(wired: Wired) -> None:
    assert wired.tokenizer.process is not None
    wired.to_scheduler.hold_requests(wired.tokenizer.process.pid)
    async with wired.client() as client:
        asking = asyncio.create_task(client.generate("hello", max_tokens=5, request_id="submitted-1").whole())
        finding = await wired.until_found("SUBMIT_UNANSWERED", request="submitted-1")
        assert finding.link == "tokenizer → scheduler"
        wired.to_scheduler.mend()
        await asyncio.wait_for(asking, 20)


async def test_a_stream_whose_end_the_tokenizer_has_not_heard_of_is_named(wired: Wired) -> None:
    assert wired.gateway.process is not None
    async with reading(wired, request_id="left-1"):
        wired.to_tokenizer.hold_requests(wired.gateway.process.pid)
    finding = await wired.until_found("STREAM_RELEASE_OWED", request="left-1")
    assert finding.link == "gateway → tokenizer"


async def test_a_killed_scheduler_is_named_and_those_who_wait_for_another_one_too(wired: Wired) -> None:
    async with reading(wired, request_id="stranded-1"):
        await wired.scheduler.kill()
        finding = await wired.until_found("PROCESS_DOWN", request="stranded-1")
        assert finding.link == "scheduler"
        unseen = [(name, address) for name, address in wired.addresses if name != "scheduler"]
        await until_found(unseen, "NO_SCHEDULER", request="stranded-1")
        await wired.scheduler.start()
        await wired.scheduler.wait_ready()
        await wired.until_going_on("stranded-1")


async def test_events_for_a_gateway_that_is_gone_are_named_until_its_grace_is_over(wired: Wired) -> None:
    async with reading(wired, request_id="abandoned-1"):
        await wired.gateway.kill()
    await wired.gateway.start()
    finding = await wired.until_found("EVENTS_NOT_SENT", request="abandoned-1")
    assert finding.link == "tokenizer → gateway"


async def test_attempts_of_a_tokenizer_that_is_gone_are_named_until_its_lease_is_over(wired: Wired) -> None:
    async with reading(wired, request_id="orphan-1"):
        wired.tokenizer.send(signal.SIGSTOP)
    await wired.tokenizer.kill()
    await wired.tokenizer.start()
    finding = await wired.until_found("ATTEMPT_ORPHANED", request="orphan-1")
    assert finding.link == "scheduler → tokenizer"


async def test_a_link_that_is_too_slow_is_named_with_how_late_its_text_comes(wired: Wired) -> None:
    async with reading(wired, n=8):
        wired.to_detokenizer.throttle(3_000)
        finding = await wired.until_found("HOP_LAGS")
        assert (finding.link, finding.severity) == ("detokenizer → tokenizer", Severity.BUSY)
        assert " s late" in finding.what


@pytest.mark.slow
async def test_a_marker_that_comes_late_over_a_slow_link_is_called_late(wired: Wired) -> None:
    async with reading(wired, n=8):
        wired.to_detokenizer.throttle(6_000)
        await wired.until_found("HOP_LAGS")
        async with wired.client() as client:
            await client.generate("hello", max_tokens=2, ignore_eos=True, request_id="late-1").whole()
        finding = await wired.until_found("UNRELEASED_MARKER", request="late-1")
        assert finding.severity is Severity.BUSY


async def test_a_batch_that_is_full_is_named(wired: Wired) -> None:
    async with reading(wired, n=MAX_RUNNING), wired.client() as client:
        asking = asyncio.create_task(client.generate("hello", max_tokens=5, request_id="queued-1").whole())
        finding = await wired.until_found("QUEUED_BATCH", request="queued-1")
        assert finding.severity is Severity.BUSY
        assert f"{MAX_RUNNING} of {MAX_RUNNING}" in finding.what
        asking.cancel()


async def test_text_that_may_begin_a_stop_text_is_held_back_and_that_is_said(wired: Wired) -> None:
    async with wired.client() as client:
        answer = await client.generate("hello", max_tokens=600, ignore_eos=True, seed=7).whole()
        text = answer.choices[0].text
        begun = [text[start : start + MAX_STOP_LENGTH - 1] for start in range(40, len(text), 1000)]
        stops = [f"{beginning}\0" for beginning in begun]  # where one is not completed, the next one has begun
        asking = asyncio.create_task(
            client.generate("hello", max_tokens=600, ignore_eos=True, seed=7, stop=stops).whole()
        )
        finding = await wired.until_found("HELD_BACK")
        assert (finding.link, finding.severity) == ("detokenizer", Severity.NOTE)
        assert "may begin a stop text (1)" in finding.what
        asking.cancel()


async def test_a_process_that_drains_is_named_and_the_loop_is_healthy(wired: Wired) -> None:
    async with reading(wired):
        async with grpc.aio.insecure_channel(wired.gateway.admin_address) as channel:
            await admin_pb2_grpc.AdminServiceStub(channel).Drain(admin_pb2.DrainRequest())
        finding = await wired.until_found("DRAINING")
        assert (finding.link, finding.severity) == ("gateway", Severity.NOTE)
    await wired.gateway.end()


@asynccontextmanager
async def lone_scheduler(*flags: str) -> AsyncIterator[tuple[scheduler_pb2_grpc.SchedulerServiceAsyncStub, str]]:
    """A scheduler without a model, and its admin address."""
    process = Killable("services.scheduler", ("--engine", "fake", *flags), admin_port=free_ports(1)[0])
    await process.start()
    try:
        await process.wait_ready()
        async with grpc.aio.insecure_channel(process.address) as channel:
            yield scheduler_pb2_grpc.SchedulerServiceStub(channel), process.admin_address
    finally:
        await process.kill()


async def test_a_step_that_its_size_does_not_explain_is_stuck_and_who_waits_behind_it_is_named() -> None:
    slow = ("--fake-prefill-us-per-token", "40000", "--max-step-tokens", "100", "--max-running", "4")
    async with lone_scheduler(*slow, "--stall-timeout-s", "1") as (stub, admin):
        await stub.Submit(submit_pb(1, prompt_ids=range(100, 700)))
        await stub.Submit(submit_pb(2, prompt_ids=[20] * 50))
        finding = await until_found([("scheduler", admin)], "STEP_STALLED")
        assert (finding.severity, finding.link) == (Severity.STUCK, "scheduler")
        finding = await until_found([("scheduler", admin)], "QUEUED_TURN", request="r-2")
        assert (finding.severity, finding.link) == (Severity.BUSY, "queue of scheduler")
        async with Loop([("scheduler", admin)]) as loop:
            views = [view for process in (await loop.find("r-1")).processes for view in process.requests]
        assert "admitted" in [moment.what for view in views for moment in view.moments], "not before its step is over"


@pytest.mark.slow
async def test_a_step_that_its_size_explains_is_only_long() -> None:
    async with lone_scheduler("--fake-prefill-us-per-token", "30000", "--stall-timeout-s", "30") as (stub, admin):
        await stub.Submit(submit_pb(1, prompt_ids=range(100, 400)))
        await asyncio.sleep(5)  # what is called long
        finding = await until_found([("scheduler", admin)], "LONG_STEP")
        diagnosis = await examine([("scheduler", admin)])
        assert (finding.severity, diagnosis.stuck) == (Severity.BUSY, False), shown(diagnosis)
