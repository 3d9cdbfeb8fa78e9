"""The standard health service, one status per service name; "" stands for the process as a whole."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

SERVICE_NAME = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name

_Response = health_pb2.HealthCheckResponse
_Context = grpc.aio.ServicerContext[Any, Any]


class Health(health_pb2_grpc.HealthServicer):
    """Answers grpc.health.v1; unlike gRPC's own servicer, a status is set at once, without awaiting its watchers."""

    def __init__(self) -> None:
        self._statuses: dict[str, bool] = {"": False}
        self._changed = asyncio.Event()  # replaced at every change, so each watcher wakes once for each

    def set(self, service_names: Iterable[str], serving: bool) -> None:
        """SERVING or NOT_SERVING for these services; the process as a whole serves while all of its services do."""
        self._statuses.update(dict.fromkeys(service_names, serving))
        named = [status for name, status in self._statuses.items() if name]
        self._statuses[""] = all(named) if named else serving
        self._changed.set()
        self._changed = asyncio.Event()

    def set_all(self, serving: bool) -> None:
        """The same for every service that was ever named, and for the process as a whole."""
        self.set([name for name in self._statuses if name], serving)

    async def Check(  # noqa: N802  # the contract's name
        self, request: health_pb2.HealthCheckRequest, context: _Context
    ) -> _Response:
        """The service's status; NOT_FOUND for a name that this process does not serve."""
        if request.service not in self._statuses:
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
        return _Response(status=self._status(request.service))

    async def Watch(  # noqa: N802
        self, request: health_pb2.HealthCheckRequest, context: _Context
    ) -> AsyncIterator[_Response]:
        """The service's status now and after each change, until the caller leaves."""
        last = None
        while True:
            changed = self._changed
            status = self._status(request.service)
            if status != last:
                yield _Response(status=status)
            last = status
            await changed.wait()

    async def List(self, request: Any, context: _Context) -> Any:  # noqa: N802  # newer than the type stubs
        """Every service's status."""
        statuses = {name: _Response(status=self._status(name)) for name in self._statuses}
        return health_pb2.HealthListResponse(statuses=statuses)  # type: ignore[attr-defined]  # as above

    def _status(self, name: str) -> Any:  # an enum value, for which the stubs have no type
        serving = self._statuses.get(name)
        if serving is None:
            return _Response.SERVICE_UNKNOWN
        return _Response.SERVING if serving else _Response.NOT_SERVING
