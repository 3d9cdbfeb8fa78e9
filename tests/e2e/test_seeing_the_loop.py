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
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import pytest_asyncio

from cli.diagnosis.finding import Finding, Severity
from cli.doctor import Diagnosis, examine
from cli.loop import Loop
from cli.stack import free_ports
from tailrace.client import Client
from tests.cable import Cable, cable
from tests.killable import Killable

pytestmark = pytest.mark.asyncio(loop_scope="module")

NAMED_WITHIN_S = 5.0
RECOVERED_WITHIN_S = 40.0
HEALTHY_RUNS = 10
PACE_MS = 5


@dataclass
class Wired:
    """Four processes, and the cables between them, by who is called."""

    gateway: Killable
    tokenizer: Killable
    detokenizer: Killable
    scheduler: Killable
    to_tokenizer: Cable
    to_detokenizer: Cable
    to_scheduler: Cable
    http_port: int

    @property
    def processes(self) -> dict[str, Killable]:
        return {
            "gateway": self.gateway,
            "tokenizer": self.tokenizer,
            "detokenizer": self.detokenizer,
            "scheduler": self.scheduler,
        }

    @property
    def addresses(self) -> list[tuple[str, str]]:
        return [(name, process.admin_address) for name, process in self.processes.items()]

    def client(self) -> Client:
        return Client(self.gateway.address)

    async def until_found(self, *codes: str) -> Finding:
        """The finding, which must come in time."""
        began = time.monotonic()
        while True:
            diagnosis = await examine(self.addresses)
            took = time.monotonic() - began
            for finding in diagnosis.findings:
                if finding.code in codes:
                    assert took < NAMED_WITHIN_S, f"{finding.code} after {took:.1f} s"
                    return finding
            assert took < 2 * NAMED_WITHIN_S, _shown(diagnosis)

    async def until_no_more_is_taken(self) -> None:
        """Until the buffers of a caller that does not read are full."""
        taken = -1
        async with Loop(self.addresses[:1]) as loop:
            while taken != (taken := await _tokens_taken(loop)) or not taken:  # noqa: ASYNC110
                await asyncio.sleep(0.3)

    async def until_healthy(self) -> None:
        """Until nothing is open and nothing is found."""
        async with asyncio.timeout(RECOVERED_WITHIN_S):
            while (diagnosis := await examine(self.addresses)).findings or diagnosis.open_requests:  # noqa: ASYNC110
                await asyncio.sleep(0.1)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def wired(model_directory: Path) -> AsyncIterator[Wired]:
    async with AsyncExitStack() as stack:
        yield await _wire(stack, model_directory)


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def _recovered(wired: Wired) -> AsyncIterator[None]:
    """Each test finds a healthy stack, and its stall is over before the next one."""
    yield
    for process in wired.processes.values():
        process.send(signal.SIGCONT)
    for laid in (wired.to_tokenizer, wired.to_detokenizer, wired.to_scheduler):
        laid.mend()
    await wired.until_healthy()


async def _wire(stack: AsyncExitStack, model: Path) -> Wired:
    ports = free_ports(8)
    near = [f"127.0.0.1:{port}" for port in ports[:3]]
    common = ("--model", str(model))
    engine = ("--engine", "fake", "--fake-pace-ms", str(PACE_MS), "--kv-tokens", "16384")
    scheduler = Killable("services.scheduler", (*common, *engine), admin_port=ports[3])
    detokenizer = Killable("services.detokenizer", (*common, "--schedulers", near[2]), admin_port=ports[4])
    upstream = ("--schedulers", near[2], "--detokenizers", near[1], "--submit-timeout-s", "20")
    tokenizer = Killable("services.tokenizer", (*common, *upstream), admin_port=ports[5])
    front = ("--tokenizers", near[0], "--http-port", str(ports[7]))
    gateway = Killable("gateway", front, admin_port=ports[6])
    targets = (tokenizer, detokenizer, scheduler)
    cables = [
        await stack.enter_async_context(cable(address, target.address))
        for address, target in zip(near, targets, strict=True)
    ]
    to_tokenizer, to_detokenizer, to_scheduler = cables
    wired = Wired(gateway, tokenizer, detokenizer, scheduler, to_tokenizer, to_detokenizer, to_scheduler, ports[7])
    for process in wired.processes.values():
        stack.push_async_callback(process.end)
        await process.start()
    await gateway.wait_ready()
    return wired


@asynccontextmanager
async def busy(wired: Wired, streams: int = 24, *, tokens: int = 400) -> AsyncIterator[None]:
    """Meanwhile so many callers read answers, each followed by the next."""

    async def ask(client: Client) -> None:
        while True:
            await client.generate("hello", max_tokens=tokens, ignore_eos=True).whole()

    async with wired.client() as client, asyncio.TaskGroup() as tasks:
        asking = [tasks.create_task(ask(client)) for _ in range(streams)]
        yield
        for task in asking:
            task.cancel()


@asynccontextmanager
async def reading(wired: Wired, **options: object) -> AsyncIterator[asyncio.Event]:
    """One caller who reads a long answer; the event says that it has begun. What becomes of it is of no interest."""
    begun = asyncio.Event()

    async def read(client: Client) -> None:
        async with client.generate("hello", max_tokens=4000, ignore_eos=True, **options) as stream:  # type: ignore[misc]
            async for _ in stream:
                begun.set()

    async with wired.client() as client:
        task = asyncio.create_task(read(client))
        try:
            await asyncio.wait_for(begun.wait(), 20)
            yield begun
        finally:
            task.cancel()
            await asyncio.wait([task])


async def _tokens_taken(loop: Loop) -> int:
    views = [view for process in (await loop.look()).processes for view in process.requests]
    return sum(choice.cursor_token_offset for view in views for choice in view.choices)


def _shown(diagnosis: Diagnosis) -> str:
    return "\n".join(f"{finding.code}: {finding.link}: {finding.what}" for finding in diagnosis.findings)


async def test_a_healthy_busy_stack_is_called_healthy_every_time(wired: Wired) -> None:
    async with busy(wired):
        for _ in range(HEALTHY_RUNS):
            diagnosis = await examine(wired.addresses)
            assert not diagnosis.stuck, _shown(diagnosis)
            assert (diagnosis.reached, diagnosis.open_requests > 0) == (4, True)


@pytest.mark.slow
@pytest.mark.timeout(600)
async def test_a_healthy_busy_stack_is_called_healthy_a_hundred_times(wired: Wired) -> None:
    async with busy(wired):
        for _ in range(100):
            diagnosis = await examine(wired.addresses)
            assert not diagnosis.stuck, _shown(diagnosis)


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
        finding = await wired.until_found("NOT_RECEIVED", "HOP_SILENT", "HOP_DOWN")
        assert (finding.link, finding.severity) == ("scheduler → detokenizer", Severity.STUCK)
        for _ in range(3):  # whoever gives up first: what the detokenizer does not get is never blamed on its own hop
            diagnosis = await examine(wired.addresses)
            stuck = {finding.link for finding in diagnosis.findings if finding.severity is Severity.STUCK}
            assert stuck == {"scheduler → detokenizer"}, _shown(diagnosis)
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
    await wired.until_healthy()
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
    for part in (*wired.processes, "decode 1", "open 1", "free", "seen-1", "generated → sent"):
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
