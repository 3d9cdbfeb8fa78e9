from __future__ import annotations

from collections.abc import AsyncIterator

import aiohttp
import pytest

from tests.integration.gateway.running_gateway import RunningGateway, running_gateway
from tests.integration.gateway.servicer import ScriptedTokenizer, serving


@pytest.fixture
async def tokenizer() -> AsyncIterator[ScriptedTokenizer]:
    """A scripted tokenizer that listens."""
    async with serving(ScriptedTokenizer()) as scripted:
        yield scripted


@pytest.fixture
async def gateway(tokenizer: ScriptedTokenizer) -> AsyncIterator[RunningGateway]:
    """A gateway in front of it, ready."""
    async with running_gateway(f"127.0.0.1:{tokenizer.port}") as running:
        yield running


@pytest.fixture
async def http(gateway: RunningGateway) -> AsyncIterator[aiohttp.ClientSession]:
    """An HTTP client whose paths are the gateway's."""
    async with aiohttp.ClientSession(gateway.url) as session:
        yield session
