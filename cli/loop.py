"""The whole loop as its processes show it: all of them asked at about one moment, their accounts joined by request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import grpc
import grpc.aio

from services.protocol.hello import Hello, from_wire
from services.protocol.views import ProcessView, RequestView
from services.protocol.views_wire import process_from_wire, request_from_wire
from services.runtime.client import connect
from tailrace.v1 import admin_pb2, admin_pb2_grpc

FLOW = ("gateway", "tokenizer", "detokenizer", "scheduler")
"""The services in the order in which requests flow; answers flow the other way."""

SILENT = "it takes connections and says nothing"
UNKNOWN = ProcessView()
ASK_TIMEOUT_S = 1.0
PAGE = 1000
PAGES_MAX = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Process:
    """One process that was asked. `why_not`: why there is no answer; `hangs`: its port takes connections and is silent.

    `known` names it before it has answered. `total` counts all that it holds, where not all is listed.
    """

    address: str
    known: str = ""
    why_not: str = ""
    hangs: bool = False
    hello: Hello | None = None
    view: ProcessView = UNKNOWN
    requests: Sequence[RequestView] = ()
    total: int = 0

    @property
    def answered(self) -> bool:
        """Whether it told of itself."""
        return self.hello is not None

    @property
    def service(self) -> str:
        """What it does; empty where nobody knows."""
        return self.view.service or (self.known if self.known in FLOW else "")

    @property
    def name(self) -> str:
        """What people may call it."""
        return self.view.name or self.known or "a process"

    @property
    def epoch(self) -> int:
        """Its incarnation; 0 when it did not answer."""
        return self.hello.epoch if self.hello is not None else 0

    @property
    def listed_all(self) -> bool:
        """Whether what isn't listed isn't there."""
        return self.answered and sum(not view.ended for view in self.requests) >= self.total


@dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """One run of a request as each service on its way knows it; None: that one does not list it."""

    key: tuple[str, int, int]
    gateway: RequestView | None = None
    tokenizer: RequestView | None = None
    detokenizer: RequestView | None = None
    scheduler: RequestView | None = None
    at: dict[str, Process]

    @property
    def name(self) -> str:
        """The caller's label, or the attempt's number."""
        labels = (view.request_id for view in (self.tokenizer, self.gateway, self.scheduler) if view is not None)
        return next((label for label in labels if label), f"attempt {self.key[1]:x}")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All processes at about one moment; `at` is monotonic seconds."""

    at: float
    processes: Sequence[Process]

    def of(self, service: str) -> list[Process]:
        """The processes of one service that answered."""
        return [process for process in self.processes if process.answered and process.service == service]

    def flows(self) -> dict[tuple[str, int, int], Flow]:
        """Every request, oldest first, joined over the services."""
        schedulers, detokenizers = self._by_attempt("scheduler"), self._by_attempt("detokenizer")
        streams = {
            (process.epoch, view.stream_id): (view, process)
            for process in self.of("gateway")
            for view in process.requests
        }
        flows = [
            _flow(view, process, schedulers, detokenizers, streams)
            for process in self.of("tokenizer")
            for view in process.requests
        ]
        found = {flow.key: flow for flow in flows}
        for attempt_id, (view, process) in schedulers.items():
            key = ("", attempt_id, 0)
            found.setdefault(key, Flow(key=key, scheduler=view, at={"scheduler": process}))
        for (epoch, stream_id), (view, process) in streams.items():
            key = ("stream", epoch, stream_id)
            found[key] = Flow(key=key, gateway=view, at={"gateway": process})
        return found

    def _by_attempt(self, service: str) -> dict[int, tuple[RequestView, Process]]:
        """Of a route that moved, the newest call's account."""
        found: dict[int, tuple[RequestView, Process]] = {}
        for process in self.of(service):
            for view in process.requests:
                known = found.get(view.attempt_id)
                if known is None or _generation(view) >= _generation(known[0]):
                    found[view.attempt_id] = view, process
        return found


class Loop:
    """Asks processes for their views, over and over, on channels that stay open."""

    def __init__(self, addresses: Sequence[tuple[str, str]]) -> None:
        """`addresses`: what each process may be called, and its admin address."""
        self._addresses = addresses
        self._channels = {address: connect(address) for _, address in addresses}

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for channel in self._channels.values():
            await channel.close()

    async def look(self, oldest: int = PAGES_MAX * PAGE) -> Snapshot:
        """Asks all at once, for the oldest requests that they hold; none is waited for longer than the bound."""
        pages = -(-oldest // PAGE)
        return await self._ask_all(admin_pb2.ListRequestsRequest(page_size=min(oldest, PAGE), brief=True), pages)

    async def find(self, request_id: str) -> Snapshot:
        """Asks all for one request, ended lately or not; detokenizers, which know attempts only, for its attempt."""
        by_label = await self._ask_all(
            admin_pb2.ListRequestsRequest(page_size=PAGE, request_id=request_id, include_ended=True)
        )
        attempts = [view.attempt_id for process in by_label.processes for view in process.requests if view.attempt_id]
        if not attempts:
            return by_label
        by_attempt = await self._ask_all(admin_pb2.ListRequestsRequest(page_size=PAGE, attempt_id=attempts[-1]))
        pairs = zip(by_label.processes, by_attempt.processes, strict=True)
        return Snapshot(by_attempt.at, tuple(b if a.service == "detokenizer" else a for a, b in pairs))

    async def _ask_all(self, request: admin_pb2.ListRequestsRequest, pages: int = PAGES_MAX) -> Snapshot:
        asked = (self._ask(name, address, request, pages) for name, address in self._addresses)
        return Snapshot(time.monotonic(), tuple(await asyncio.gather(*asked)))

    async def _ask(self, name: str, address: str, request: admin_pb2.ListRequestsRequest, most: int) -> Process:
        stub = admin_pb2_grpc.InspectionServiceStub(self._channels[address])
        try:
            async with asyncio.timeout(ASK_TIMEOUT_S):
                pages = [page async for page in _pages(stub, request, most)]
        except TimeoutError:
            return Process(address=address, known=name, why_not=SILENT, hangs=True)
        except grpc.aio.AioRpcError as error:
            why_not = _in_words(error)
            return Process(address=address, known=name, why_not=why_not, hangs=why_not == SILENT)
        last = pages[-1]
        return Process(
            address=address,
            known=name,
            hello=from_wire(last.hello),
            view=process_from_wire(last.process),
            requests=tuple(request_from_wire(view) for page in pages for view in page.requests),
            total=last.total,
        )


async def _pages(
    stub: admin_pb2_grpc.InspectionServiceAsyncStub, request: admin_pb2.ListRequestsRequest, most: int
) -> AsyncIterator[admin_pb2.ListRequestsResponse]:
    asked = admin_pb2.ListRequestsRequest()
    asked.CopyFrom(request)
    for _ in range(most):
        page = await stub.ListRequests(asked, timeout=ASK_TIMEOUT_S)
        yield page
        if not page.next_page_token:
            return
        asked.page_token = page.next_page_token


def _flow(
    view: RequestView,
    process: Process,
    schedulers: dict[int, tuple[RequestView, Process]],
    detokenizers: dict[int, tuple[RequestView, Process]],
    streams: dict[tuple[int, int], tuple[RequestView, Process]],
) -> Flow:
    """A tokenizer's entry with what the others know of it; each of theirs is taken out, but a shared run's."""
    at = {"tokenizer": process}
    views: dict[str, RequestView] = {}
    readers = ((reader.gateway_epoch, reader.stream_id) for reader in view.readers)
    for service, found in (
        ("scheduler", schedulers.pop(view.attempt_id, None)),
        ("detokenizer", detokenizers.get(view.attempt_id)),
        ("gateway", next((streams.pop(reader) for reader in readers if reader in streams), None)),
    ):
        if found is not None:
            views[service], at[service] = found
    return Flow(
        key=("", view.attempt_id, process.epoch),
        tokenizer=view,
        gateway=views.get("gateway"),
        detokenizer=views.get("detokenizer"),
        scheduler=views.get("scheduler"),
        at=at,
    )


def _generation(view: RequestView) -> int:
    return view.route.generation if view.route is not None else 0


def _in_words(error: grpc.aio.AioRpcError) -> str:
    details = (error.details() or "").lower()
    match error.code():
        case grpc.StatusCode.UNAVAILABLE if "refused" in details:
            return "nobody listens there"
        case grpc.StatusCode.UNAVAILABLE if "dns" in details:
            return "no such host is known"
        case grpc.StatusCode.UNAVAILABLE | grpc.StatusCode.DEADLINE_EXCEEDED:
            return SILENT
        case grpc.StatusCode.UNIMPLEMENTED:
            return "what listens there is no admin port of Tailrace"
        case code:
            return f"{code.name}: {error.details()}"
