from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tailrace.client import Client
from tests.integration.client.servicer import ScriptedServer, serving


@pytest.fixture
async def server() -> AsyncIterator[ScriptedServer]:
    async with serving() as scripted:
        yield scripted


@pytest.fixture
async def client(server: ScriptedServer) -> AsyncIterator[Client]:
    async with Client(server.address) as connected:
        yield connected
