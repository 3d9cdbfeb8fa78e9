"""The fixtures of the tokenizer's integration tests, and a connected gateway."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.integration.tokenizer.conftest import System, system, tiny_model
from tests.integration.tokenizer.gateway import Gateway

__all__ = ["gateway", "system", "tiny_model"]


@pytest.fixture(name="gateway")
async def gateway(system: System) -> AsyncIterator[Gateway]:  # pytest's way of naming what it needs
    """A gateway whose event stream is open."""
    gateway = Gateway(system.tokenizer)
    await gateway.connect()
    yield gateway
    await gateway.disconnect()
