"""The processes that chaos strikes: several of each service, each on ports that it keeps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc.aio

from cli.stack import free_ports
from tailrace.v1 import admin_pb2, admin_pb2_grpc
from tests.killable import Killable

SERVICES = ("gateway", "tokenizer", "detokenizer", "scheduler")
START_TIMEOUT_S = 180.0
IDLE_TIMEOUT_S = 120.0
POLL_S = 0.25
_MODULES = {"gateway": "gateway", **{name: f"services.{name}" for name in SERVICES[1:]}}


@dataclass(frozen=True)
class Fleet:
    """All processes by service, and where callers reach the gateways."""

    members: Mapping[str, Sequence[Killable]]
    http: Sequence[str]

    @property
    def grpc(self) -> Sequence[str]:
        """Where every gateway answers over gRPC."""
        return [gateway.address for gateway in self.members["gateway"]]

    async def wait_ready(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Until every process takes requests. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            await asyncio.gather(*(member.wait_ready() for member in self._all()))

    async def left_behind(self) -> dict[str, int]:
        """How many entries the ledgers of each service keep although nothing is asked, after a time to let go."""
        try:
            async with asyncio.timeout(IDLE_TIMEOUT_S):
                while any((await self._remembered()).values()):  # noqa: ASYNC110  # a ledger can only be asked
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            pass
        return await self._remembered()

    async def _remembered(self) -> dict[str, int]:
        return {
            name: sum(await asyncio.gather(*(_total(member.admin_address) for member in members)))
            for name, members in self.members.items()
        }

    def _all(self) -> Iterable[Killable]:
        return (member for members in self.members.values() for member in members)


@asynccontextmanager
async def running(
    model: Path, counts: Mapping[str, int], engine_flags: Sequence[str], logs: Path
) -> AsyncIterator[Fleet]:
    """Starts `counts` processes of each service, waits until they are ready, and ends them. Logs go to files."""
    ports = iter(free_ports(3 * sum(counts.values())))
    members: dict[str, list[Killable]] = {}

    def add(name: str, *flags: str, own: Sequence[tuple[str, ...]] = ()) -> str:
        members[name] = [
            Killable(_MODULES[name], (*flags, *more), logs / f"{name}-{k}.log", next(ports), next(ports))
            for k, more in enumerate(own or [()] * counts[name])
        ]
        return ",".join(member.address for member in members[name])

    with_model = ("--model", str(model))
    schedulers = add("scheduler", *with_model, *engine_flags)
    detokenizers = add("detokenizer", *with_model, "--schedulers", schedulers)
    tokenizers = add("tokenizer", *with_model, "--schedulers", schedulers, "--detokenizers", detokenizers)
    http_ports = [str(next(ports)) for _ in range(counts["gateway"])]
    add("gateway", "--tokenizers", tokenizers, own=[("--http-port", port) for port in http_ports])
    http = [f"http://127.0.0.1:{port}" for port in http_ports]

    fleet = Fleet({name: members[name] for name in SERVICES}, http)
    async with AsyncExitStack() as stack:
        for name in reversed(SERVICES):  # ended in the order in which requests flow
            for member in members[name]:
                stack.push_async_callback(member.end)
                await member.start()
        await fleet.wait_ready()
        yield fleet


async def _total(admin_address: str) -> int:
    async with grpc.aio.insecure_channel(admin_address) as channel:
        stub = admin_pb2_grpc.InspectionServiceStub(channel)
        answer: admin_pb2.ListRequestsResponse = await stub.ListRequests(
            admin_pb2.ListRequestsRequest(page_size=1), timeout=10, wait_for_ready=True
        )
        return answer.total
