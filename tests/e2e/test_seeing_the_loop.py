"""Stalls of real processes, each named by `tailrace doctor` within seconds; a healthy stack is never blamed.

And what `tailrace trace` and `tailrace top` show of the same processes.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from cli.diagnosis.finding import Severity
from cli.doctor import examine
from cli.stack import free_ports
from tailrace.client import Client
from tests.e2e.wired import Wired, busy, reading, shown, wired_stack
from tests.killable import Killable

pytestmark = pytest.mark.asyncio(loop_scope="module")

HEALTHY_RUNS = 10


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def wired(model_directory: Path) -> AsyncIterator[Wired]:
    async with wired_stack(model_directory) as stack:
        yield stack


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def _recovered(wired: Wired) -> AsyncIterator[None]:
    """Each test finds a healthy stack, and its stall is over before the next one."""
    yield
    await wired.recover()


async def test_a_healthy_busy_stack_is_called_healthy_every_time(wired: Wired) -> None:
    async with busy(wired):
        for _ in range(HEALTHY_RUNS):
            diagnosis = await examine(wired.addresses)
            assert not diagnosis.stuck, shown(diagnosis)
            assert (diagnosis.reached, diagnosis.open_requests > 0) == (4, True)


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_healthy_busy_stack_is_called_healthy_a_hundred_times(wired: Wired) -> None:
    async with busy(wired):
        for _ in range(100):
            diagnosis = await examine(wired.addresses)
            assert not diagnosis.stuck, shown(diagnosis)


@pytest.mark.parametrize("name", ["gateway", "tokenizer", "detokenizer", "scheduler"])
async def test_a_stopped_process_is_named(wired: Wired, name: str) -> None:
    async with reading(wired):
        wired.processes[name].send(signal.SIGSTOP)
        finding = await wired.until_found("PROCESS_HANGS")
        assert finding.link == name
        wired.processes[name].send(signal.SIGCONT)


async def test_tokens_that_the_detokenizer_does_not_get_are_named_with_their_requests(wired: Wired) -> None:
    assert wired.detokenizer.process is not None
    async with reading(wired, request_id="stuck-1"):
        wired.to_scheduler.freeze(wired.detokenizer.process.pid)
        finding = await wired.until_found("NOT_RECEIVED", "HOP_SILENT", "HOP_DOWN", request="stuck-1")
        assert (finding.link, finding.severity) == ("scheduler → detokenizer", Severity.STUCK)
        for _ in range(3):  # whoever gives up first: what the detokenizer does not get is never blamed on its own hop
            diagnosis = await examine(wired.addresses)
            stuck = {finding.link for finding in diagnosis.findings if finding.severity is Severity.STUCK}
            assert stuck == {"scheduler → detokenizer"}, shown(diagnosis)
        await wired.until_found("HOP_DOWN", request="stuck-1")
        wired.to_scheduler.mend()


async def test_text_that_the_tokenizer_does_not_get_is_named(wired: Wired) -> None:
    async with reading(wired):
        wired.to_detokenizer.freeze()
        finding = await wired.until_found("TEXT_NOT_RECEIVED", "HOP_SILENT", "HOP_DOWN")
        assert finding.link == "detokenizer → tokenizer"
        wired.to_detokenizer.mend()


async def test_events_that_the_gateway_does_not_get_are_named(wired: Wired) -> None:
    async with reading(wired):
        wired.to_tokenizer.freeze()
        finding = await wired.until_found("EVENTS_NOT_RECEIVED", "HOP_SILENT", "HOP_DOWN")
        assert finding.link == "tokenizer → gateway"
        wired.to_tokenizer.mend()


async def test_a_link_that_is_cut_is_named_with_the_reason(wired: Wired) -> None:
    wired.to_detokenizer.cut()
    finding = await wired.until_found("HOP_DOWN")
    assert finding.link == "detokenizer → tokenizer"
    assert wired.to_detokenizer.address in finding.what


async def test_a_caller_that_stops_reading_is_named(wired: Wired) -> None:
    body = json.dumps({"prompt": "a", "max_tokens": 1900, "n": 8, "stream": True, "ignore_eos": True, "logprobs": 3})
    with socket.socket() as caller:
        caller.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        caller.connect(("127.0.0.1", wired.http_port))
        head = (
            f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
        )
        caller.sendall(f"{head}\r\n\r\n{body}".encode())
        await wired.until_no_more_is_taken()
        finding = await wired.until_found("CALLER_READS_NOT")
        assert finding.link == "gateway → caller"


async def test_a_release_that_is_held_up_is_named(wired: Wired) -> None:
    assert wired.tokenizer.process is not None
    async with wired.client() as client:
        stream = client.generate("hello", max_tokens=120, ignore_eos=True, request_id="held-1")
        async with stream:
            async for _ in stream:
                wired.to_scheduler.hold_requests(wired.tokenizer.process.pid)
        finding = await wired.until_found("UNRELEASED_RELEASE_ANSWER")
        assert (finding.link, list(finding.requests)) == ("tokenizer → scheduler", ["held-1"])
        wired.to_scheduler.mend()


async def test_a_queue_that_waits_for_memory_says_so(wired: Wired) -> None:
    async def ask(client: Client, token_id: int) -> None:
        await client.generate([token_id] * 7000, max_tokens=1000, ignore_eos=True).whole()

    async with wired.client() as client, asyncio.TaskGroup() as tasks:
        asking = [tasks.create_task(ask(client, 20 + number)) for number in range(4)]
        finding = await wired.until_found("QUEUED_BLOCKS")
        assert (finding.severity, finding.link) == (Severity.BUSY, "queue of scheduler")
        for task in asking:
            task.cancel()


async def test_a_process_of_another_model_is_named(wired: Wired, model_directory: Path) -> None:
    flags = ("--model", str(model_directory), "--engine", "fake", "--model-id", "another")
    odd = Killable("services.scheduler", flags, admin_port=free_ports(1)[0])
    await odd.start()
    try:
        await odd.wait_ready()
        diagnosis = await examine([*wired.addresses, ("odd", odd.admin_address)])
        [finding] = [f for f in diagnosis.findings if f.severity is Severity.STUCK]
        assert (finding.code, "'another'" in finding.what) == ("MISMATCH", True)
        diagnosis = await examine([*wired.addresses[:-1], ("odd", odd.admin_address)])
        assert "UNKNOWN_PEER" in [finding.code for finding in diagnosis.findings], shown(diagnosis)
    finally:
        await odd.end()


async def run(wired: Wired, *command: str) -> tuple[int | None, str]:
    """A command as a person types it: its exit code, and what it printed."""
    admin = ",".join(f"{name}={address}" for name, address in wired.addresses)
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "cli.main", *command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "TAILRACE_ADMIN": admin, "COLUMNS": "140"},
    )  # fmt: skip
    out, _ = await process.communicate()
    return process.returncode, out.decode()


async def test_trace_shows_a_request_while_it_lives_and_after_it_has_ended(wired: Wired) -> None:
    async with reading(wired, request_id="traced-1"):
        code, said = await run(wired, "trace", "traced-1")
        assert (code, "streaming" in said, "so far" in said, "taken by the caller" in said) == (0, True, True, True)
    await wired.recover()
    code, said = await run(wired, "trace", "traced-1", "--json")
    [traced] = json.loads(said)
    assert (code, traced["views"]["tokenizer"]["caller_phase"]) == (0, "GONE")
    assert traced["views"]["tokenizer"]["moments"][0]["what"] == "opened"
    spans = {(span["service"], span["name"]) for span in traced["spans"]}
    assert spans >= {("scheduler", "queued"), ("scheduler", "prefill"), ("tokenizer", "release")}
    assert (await run(wired, "trace", "nobody"))[0] == 1


async def test_top_prints_one_picture_for_scripts(wired: Wired) -> None:
    async with reading(wired, request_id="seen-1"):
        code, said = await run(wired, "top", "--once")
    assert code == 0
    for part in (*wired.processes, "decode 1", "open 1", "free", "seen-1", "generated → sent", "late"):
        assert part in said, said


async def test_the_command_says_it_with_its_exit_code_and_as_json(wired: Wired) -> None:
    code, healthy = await run(wired, "doctor", "--json")
    assert (code, json.loads(healthy)["healthy"], json.loads(healthy)["findings"]) == (0, True, [])
    wired.to_detokenizer.cut()
    await wired.until_found("HOP_DOWN")
    code, said = await run(wired, "doctor")
    assert (code, "detokenizer → tokenizer" in said, "→ " in said) == (1, True, True)
    nowhere = free_ports(1)[0]
    code, said = await run(wired, "doctor", "--admin", f"127.0.0.1:{nowhere}")
    assert (code, str(nowhere) in said) == (3, True)
