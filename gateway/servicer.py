"""GenerationService on the gateway's own port: the shared servicer, with the tenant told by the call's API key."""

from __future__ import annotations

from gateway.auth import Tenants
from gateway.requests import RemoteRequests
from services.protocol.generation import Context, GenerationServicer

SERVICE_NAME = "tailrace.v1.GenerationService"


def generation_servicer(requests: RemoteRequests, tenants: Tenants) -> GenerationServicer:
    """The servicer; a call without a known key is refused when keys are in use."""
    return GenerationServicer(requests, lambda context: tenants.name_of(_authorization(context)))


def _authorization(context: Context) -> str | None:
    for key, value in context.invocation_metadata() or ():
        if key == "authorization" and isinstance(value, str):
            return value
    return None
