"""Aborts through the gateway find whoever has the request, whatever the other tokenizers do."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tailrace.v1 import generation_pb2
from tests.integration.gateway.running_gateway import RunningGateway, wait_until
from tests.integration.gateway.servicer import ScriptedTokenizer
from tests.integration.gateway.test_strays import (
    begin,
    make_ready,
    make_unready,
    read,
    request,
    text_of,
    two_tokenizers,
)


async def test_the_only_tokenizer_is_asked_when_it_takes_nothing_new(
    gateway: RunningGateway, tokenizer: ScriptedTokenizer
) -> None:
    tokenizer.script = begin
    events: list[Any] = []
    async with gateway.stub() as stub:
        reading = asyncio.create_task(read(stub.Generate(request()), events))
        await wait_until(lambda: text_of(events) == "one two ")
        await make_unready(tokenizer, gateway)
        answer = await stub.Abort(generation_pb2.AbortRequest(request_id="r-0"), timeout=5)
        await reading
    assert answer.outcome == generation_pb2.ABORT_OUTCOME_ABORTING


@pytest.mark.parametrize("dies", [False, True])
async def test_a_tokenizer_that_hangs_or_dies_does_not_keep_an_abort_from_the_one_that_has_the_request(
    dies: bool,
) -> None:
    async with two_tokenizers() as (_, second, gateway), gateway.stub() as stub:
        number = next(
            at for at in range(64) if str(second.port) in gateway.gateway.router.in_order("", f"r-{at}")[0].address
        )
        events: list[Any] = []
        reading = asyncio.create_task(read(stub.Generate(request(number)), events))
        await wait_until(lambda: text_of(events) == "one two ")

        asked = asyncio.Event()

        async def never() -> None:
            asked.set()
            await asyncio.Event().wait()

        second.before_abort = never
        await make_ready(second, gateway)
        second.heartbeats = False
        aborting = stub.Abort(generation_pb2.AbortRequest(request_id=f"r-{number}"), timeout=10)
        await asyncio.wait_for(asked.wait(), 10)
        if dies:
            await second.stop()
        answer = await aborting
        await reading
    assert answer.outcome == generation_pb2.ABORT_OUTCOME_ABORTING
