"""Channels to other processes: they reconnect quickly, survive silence, and no unary call is without a deadline."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Protocol, TypeVar

import grpc

from services.runtime.server import KEEPALIVE_INTERVAL_MS, KEEPALIVE_TIMEOUT_MS, MAX_MESSAGE_BYTES, MAX_METADATA_BYTES

DEFAULT_UNARY_TIMEOUT_S = 5.0
RECONNECT_BACKOFF_MS_MIN = 100
RECONNECT_BACKOFF_MS_MAX = 1000
CONNECT_TIMEOUT_MS = 5000

_ROUND_ROBIN = json.dumps({"loadBalancingConfig": [{"round_robin": {}}]})


class Cancellable(Protocol):
    """What `open_stream` needs of a call."""

    def cancel(self) -> bool:
        """Ends the call if it has not ended yet."""
        ...


Call = TypeVar("Call", bound=Cancellable)


def connect(
    address: str,
    *,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    credentials: grpc.ChannelCredentials | None = None,
    options: Sequence[tuple[str, Any]] = (),
) -> grpc.aio.Channel:
    """A channel to `host:port`, or to each address behind a DNS name in turn. Must be made inside a running loop.

    A unary call without a timeout gets DEFAULT_UNARY_TIMEOUT_S. Streams have none of their own: give them what is left
    of the request's time, or watch their heartbeats, and open them with `open_stream`.
    """
    every_option = [*_options(max_message_bytes), *options]
    interceptors = [_DefaultDeadline()]
    if credentials is not None:
        return grpc.aio.secure_channel(address, credentials, options=every_option, interceptors=interceptors)
    return grpc.aio.insecure_channel(address, options=every_option, interceptors=interceptors)


@asynccontextmanager
async def open_stream(start: Callable[[], Call]) -> AsyncIterator[Call]:
    """Starts a streaming call and cancels it on every way out; leaving `async for` alone would leave it running."""
    call = start()
    try:
        yield call
    finally:
        call.cancel()


class _DefaultDeadline(grpc.aio.UnaryUnaryClientInterceptor):
    """Gives a unary call its deadline where the caller gave none."""

    async def intercept_unary_unary(
        self,
        continuation: Callable[[grpc.aio.ClientCallDetails, Any], Any],
        client_call_details: grpc.aio.ClientCallDetails,
        request: Any,
    ) -> Any:
        """Passes the call on with a timeout."""
        details = client_call_details
        if details.timeout is None:
            details = grpc.aio.ClientCallDetails(
                method=details.method,
                timeout=DEFAULT_UNARY_TIMEOUT_S,
                metadata=details.metadata,
                credentials=details.credentials,
                wait_for_ready=details.wait_for_ready,
            )
        return await continuation(details, request)


def _options(max_message_bytes: int) -> list[tuple[str, Any]]:
    return [
        ("grpc.service_config", _ROUND_ROBIN),
        ("grpc.enable_http_proxy", 0),  # hops between our processes never go through a company's web proxy
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.keepalive_time_ms", KEEPALIVE_INTERVAL_MS),
        ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.initial_reconnect_backoff_ms", RECONNECT_BACKOFF_MS_MIN),
        ("grpc.max_reconnect_backoff_ms", RECONNECT_BACKOFF_MS_MAX),
        ("grpc.min_reconnect_backoff_ms", CONNECT_TIMEOUT_MS),  # in the C core, the least time for one attempt
        ("grpc.dns_min_time_between_resolutions_ms", RECONNECT_BACKOFF_MS_MAX),
    ]
