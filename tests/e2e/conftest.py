from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tailrace.client import Client
from tests.stack import Stack, in_process_stack


@pytest.fixture
async def stack(model_directory: Path) -> AsyncIterator[Stack]:
    """All four services in this test's loop, with the fake engine and the embedded model's tokenizer."""
    async with in_process_stack(model_directory) as running:
        yield running


@pytest.fixture
async def client(stack: Stack) -> AsyncIterator[Client]:
    async with Client(stack.grpc) as connected:
        yield connected
