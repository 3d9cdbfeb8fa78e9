"""Four processes with a cable between each two of them, for whoever makes them stall and asks the doctor."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from cli.admin_addresses import Named
from cli.diagnosis.finding import Finding
from cli.doctor import Diagnosis, examine
from cli.loop import Loop
from cli.stack import free_ports
from tailrace.client import Client
from tests.cable import Cable, cable
from tests.killable import Killable

NAMED_WITHIN_S = 5.0
RECOVERED_WITHIN_S = 40.0
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

    async def until_found(self, *codes: str, request: str = "") -> Finding:
        """The finding, which must come in time."""
        return await until_found(self.addresses, *codes, request=request)

    async def until_going_on(self, request_id: str) -> None:
        """Until a request's caller gets tokens again."""
        async with asyncio.timeout(RECOVERED_WITHIN_S), Loop(self.addresses) as loop:
            taken = await tokens_taken(loop, request_id)
            while await tokens_taken(loop, request_id) <= taken:  # noqa: ASYNC110
                await asyncio.sleep(0.1)

    async def recover(self) -> None:
        """Lets go on whatever was stopped, frozen or cut, starts again what was killed, and waits until all is well."""
        for laid in (self.to_tokenizer, self.to_detokenizer, self.to_scheduler):
            laid.mend()
        for process in self.processes.values():
            process.send(signal.SIGCONT)
            if process.process is not None and process.process.returncode is not None:
                await process.start()
        async with asyncio.timeout(RECOVERED_WITHIN_S):
            while (diagnosis := await examine(self.addresses)).findings or diagnosis.open_requests:  # noqa: ASYNC110
                await asyncio.sleep(0.1)

    async def until_no_more_is_taken(self) -> None:
        """Until the buffers of a caller that does not read are full."""
        taken = -1
        async with Loop(self.addresses[:1]) as loop:
            while taken != (taken := await tokens_taken(loop)) or not taken:  # noqa: ASYNC110
                await asyncio.sleep(0.3)


@asynccontextmanager
async def wired_stack(
    model: Path, *, scheduler: Sequence[str] = (), tokenizer: Sequence[str] = ()
) -> AsyncIterator[Wired]:
    """All four, ready, with the fake engine; more flags for two of them."""
    ports = free_ports(8)
    near = [f"127.0.0.1:{port}" for port in ports[:3]]
    common = ("--model", str(model))
    engine = ("--engine", "fake", "--fake-pace-ms", str(PACE_MS), "--kv-tokens", "16384", *scheduler)
    upstream = ("--schedulers", near[2], "--detokenizers", near[1], "--submit-timeout-s", "20", *tokenizer)
    processes = (
        Killable("gateway", ("--tokenizers", near[0], "--http-port", str(ports[7])), admin_port=ports[6]),
        Killable("services.tokenizer", (*common, *upstream), admin_port=ports[5]),
        Killable("services.detokenizer", (*common, "--schedulers", near[2]), admin_port=ports[4]),
        Killable("services.scheduler", (*common, *engine), admin_port=ports[3]),
    )
    async with AsyncExitStack() as stack:
        to_tokenizer, to_detokenizer, to_scheduler = [
            await stack.enter_async_context(cable(address, target.address))
            for address, target in zip(near, processes[1:], strict=True)
        ]
        for process in processes:
            stack.push_async_callback(process.end)
            await process.start()
        await processes[0].wait_ready()
        yield Wired(*processes, to_tokenizer, to_detokenizer, to_scheduler, ports[7])


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


async def until_found(addresses: Sequence[Named], *codes: str, request: str = "") -> Finding:
    """The finding, which must come in time, and name the request where one is given."""
    began = time.monotonic()
    while True:
        diagnosis = await examine(addresses)
        took = time.monotonic() - began
        for finding in diagnosis.findings:
            if finding.code in codes and (not request or request in finding.requests):
                assert took < NAMED_WITHIN_S, f"{finding.code} after {took:.1f} s"
                return finding
        assert took < 2 * NAMED_WITHIN_S, shown(diagnosis)


async def tokens_taken(loop: Loop, request_id: str = "") -> int:
    """By callers, of one request or of all."""
    views = [
        view
        for process in (await loop.look()).of("gateway")
        for view in process.requests
        if request_id in ("", view.request_id)
    ]
    return sum(choice.cursor_token_offset for view in views for choice in view.choices)


def shown(diagnosis: Diagnosis) -> str:
    """What was found, for a test that fails."""
    return "\n".join(f"{finding.code}: {finding.link}: {finding.what}" for finding in diagnosis.findings)
