"""A request whose scheduler died, and whose output so far is more than a message may have."""

from __future__ import annotations

import pytest

from services.protocol.events import TokenInfo, TopLogprob
from tailrace.v1 import common_pb2, generation_pb2
from tests.integration.tokenizer.conftest import System
from tests.integration.tokenizer.gateway import Gateway

CHOICES = 8
TOKENS = 1000


async def test_what_is_too_large_to_be_continued_ends_and_is_not_tried_for_ever(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.tokenizer.upstream.MAX_MESSAGE_BYTES", 1 << 20)  # 128 choices would do at 16 MiB
    gateway = Gateway(system.tokenizer)
    await gateway.connect()
    options = generation_pb2.GenerationOptions(n=CHOICES, output=generation_pb2.OutputOptions(logprobs=20))
    await gateway.open(1, options=options)
    [entry] = system.app.ledger
    info = TokenInfo(249, b"x", -1.25, (TopLogprob(249, -1.25, b"x"),) * 20)
    for log in entry.log.choices:
        log.append(0, [249] * TOKENS, 0, "x" * TOKENS, [info] * TOKENS)
    system.engine.restart()
    stream = await gateway.completed(1)
    assert {finish.error.code for finish in stream.finishes} == {common_pb2.ERROR_CODE_ENGINE_LOST}
    assert len(stream.finishes) == CHOICES
    assert len(entry.attempts) == 2
    await gateway.release(1)
    await system.until_idle()
    await gateway.disconnect()
