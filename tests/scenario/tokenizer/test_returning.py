"""Callers who come back, over real gRPC: resumed, attached, asked for twice."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from services.runtime.errors import AlreadyExists, InvalidRequest, NotFound, Overloaded
from tailrace.v1 import common_pb2, generation_pb2, tokenizer_pb2
from tests.integration.tokenizer.conftest import System, started
from tests.integration.tokenizer.gateway import Gateway
from tests.scenario.tokenizer.test_lifecycle import refusal, until

Options = generation_pb2.GenerationOptions
DETACHED = Options(on_disconnect=generation_pb2.ON_DISCONNECT_DETACH)
PIECES = [(5, "ab"), (6, ""), (7, "cé"), (8, "d"), (9, "ef")]


async def read_all(call: Any) -> list[generation_pb2.GenerationEvent]:
    """Every event until the stream's end."""
    return [event async for event in call]


def joined(events: list[generation_pb2.GenerationEvent]) -> tuple[str, list[int]]:
    """Text and ids of the deltas."""
    deltas = [event.delta for event in events if event.HasField("delta")]
    return "".join(delta.text for delta in deltas), [token_id for delta in deltas for token_id in delta.token_ids]


def resume_request(told: generation_pb2.Started, tokens: int = 0, text: int = 0) -> generation_pb2.ResumeRequest:
    """From these offsets of choice 0."""
    offset = generation_pb2.ChoiceOffset(choice=0, token_offset=tokens, text_offset=text)
    return generation_pb2.ResumeRequest(request_id=told.request_id, resume_token=told.resume_token, offsets=[offset])


async def detach(system: System, **request: Any) -> generation_pb2.Started:
    """A direct caller that leaves as soon as its request was accepted."""
    request.setdefault("options", DETACHED)
    call: Any = system.generation.Generate(generation_pb2.GenerateRequest(text="abc", **request))
    started = (await call.read()).started
    call.cancel()
    await until(lambda: all(not entry.readers for entry in system.app.ledger))
    return started  # type: ignore[no-any-return]  # the stub's read is untyped


async def test_a_detached_request_is_resumed_at_every_offset_with_exactly_the_rest(system: System) -> None:
    told = await detach(system)
    system.engine.tokens(system.engine.submits[0].attempt_id, PIECES)
    text = "".join(piece for _, piece in PIECES)
    await until(lambda: system.app.ledger and next(iter(system.app.ledger)).progress == len(PIECES))
    calls: list[Any] = []
    for tokens in range(len(PIECES) + 1):
        at = sum(len(piece) for _, piece in PIECES[:tokens])
        calls.append(system.generation.Resume(resume_request(told, tokens, at)))
    readers = [asyncio.create_task(read_all(call)) for call in calls]
    await until(lambda: len(next(iter(system.app.ledger)).readers) == len(calls))
    system.engine.finish(system.engine.submits[0].attempt_id)
    for tokens, reader in enumerate(readers):
        events = await reader
        at = sum(len(piece) for _, piece in PIECES[:tokens])
        assert events[0].started == told
        assert joined(events) == (text[at:], [token_id for token_id, _ in PIECES[tokens:]])
        assert events[-1].HasField("completed")
    await system.until_idle()


async def test_offsets_beyond_what_there_is_are_refused_at_once(system: System) -> None:
    told = await detach(system)
    for tokens, text in ((1, 0), (0, 1)):
        error = await refusal(system.generation.Resume(resume_request(told, tokens, text)).read())
        assert isinstance(error, InvalidRequest)
        assert error.field == "offsets"
    assert len(system.engine.submits) == 1


async def test_a_wrong_token_and_another_tenant_find_nothing(system: System, gateway: Gateway) -> None:
    told = await detach(system)
    wrong = generation_pb2.ResumeRequest(request_id=told.request_id, resume_token=b"x" * 16)
    assert isinstance(await refusal(system.generation.Resume(wrong).read()), NotFound)
    attach = tokenizer_pb2.AttachRequest(gateway_epoch=9, stream_id=1, tenant="other", resume=resume_request(told))
    assert isinstance(await refusal(gateway.stub.Attach(attach)), NotFound)


async def test_a_gateway_attaches_in_mid_stream_and_gets_it_again_after_its_reconnect(
    system: System, gateway: Gateway
) -> None:
    told = await detach(system)
    attempt_id = system.engine.submits[0].attempt_id
    system.engine.tokens(attempt_id, PIECES)
    attach = tokenizer_pb2.AttachRequest(gateway_epoch=9, stream_id=1, resume=resume_request(told))
    assert (await gateway.stub.Attach(attach)).started == told
    system.engine.finish(attempt_id)
    stream = await gateway.completed(1)
    assert stream.texts == {0: "abcédef"}
    await gateway.disconnect()
    await gateway.connect()
    assert (await gateway.completed(1)).ids == stream.ids
    await gateway.release(1)
    await system.until_idle()


async def test_a_finished_answer_stays_readable_as_long_as_was_asked(system: System) -> None:
    system.engine.on_submit = lambda request: system.engine.answer(request.attempt_id, "kept")
    request = generation_pb2.GenerateRequest(request_id="x", text="abc", options=Options(retain_ms=800))
    first = await read_all(system.generation.Generate(request))
    again = await read_all(system.generation.Resume(resume_request(first[0].started, 1, 1)))
    assert joined(first)[0] == "kept"
    assert joined(again)[0] == "ept"
    assert await read_all(system.generation.Generate(request)) == await read_all(
        system.generation.Resume(resume_request(first[0].started))
    )
    assert len(system.engine.submits) == 1
    other = generation_pb2.GenerateRequest(request_id="x", text="other")
    assert isinstance(await refusal(system.generation.Generate(other).read()), AlreadyExists)
    await system.until_idle()
    error = await refusal(system.generation.Resume(resume_request(first[0].started)).read())
    assert isinstance(error, NotFound)


async def test_fifty_equal_generates_at_once_are_one_run_and_fifty_equal_streams(system: System) -> None:
    system.engine.hold_submit = asyncio.Event()
    request = generation_pb2.GenerateRequest(request_id="x", text="abc")
    readers = [asyncio.create_task(read_all(system.generation.Generate(request))) for _ in range(50)]
    await until(lambda: len(system.app.ledger) and len(next(iter(system.app.ledger)).readers) == 50)
    system.engine.hold_submit.set()
    await system.engine.until(lambda: system.engine.submits)
    system.engine.answer(system.engine.submits[0].attempt_id, "one")
    streams = [await reader for reader in readers]
    assert len(system.engine.submits) == 1
    assert {joined(events)[0] for events in streams} == {"one"}
    assert len({(str(events[0]), str(events[-2:])) for events in streams}) == 1
    await system.until_idle()


async def test_one_of_two_equal_callers_may_leave_before_acceptance_and_the_other_is_served(system: System) -> None:
    system.engine.hold_submit = asyncio.Event()
    request = generation_pb2.GenerateRequest(request_id="x", text="abc")
    leaver: Any = system.generation.Generate(request)
    stayer = asyncio.create_task(read_all(system.generation.Generate(request)))
    await until(lambda: len(system.app.ledger) and len(next(iter(system.app.ledger)).readers) == 2)
    leaver.cancel()
    await until(lambda: len(next(iter(system.app.ledger)).readers) == 1)
    system.engine.hold_submit.set()
    await system.engine.until(lambda: system.engine.submits)
    system.engine.answer(system.engine.submits[0].attempt_id, "served")
    assert joined(await stayer)[0] == "served"
    await system.until_idle()


async def test_no_more_is_promised_to_be_kept_than_there_is_room_for(tiny_model: Path) -> None:
    async with started(tiny_model, max_kept_answers=1) as system:
        told = await detach(system)
        error = await refusal(
            system.generation.Generate(generation_pb2.GenerateRequest(text="abc", options=DETACHED)).read()
        )
        assert isinstance(error, Overloaded)
        assert error.reason == "RETENTION_FULL"
        assert len(system.engine.submits) == 1
        await system.generation.Abort(generation_pb2.AbortRequest(request_id=told.request_id))
        await system.until_idle()


@pytest.mark.parametrize("ends", ["scheduler", "route"])
async def test_a_detached_request_outlives_what_dies_behind_it(system: System, ends: str) -> None:
    told = await detach(system)
    system.engine.tokens(system.engine.submits[0].attempt_id, [(5, "a")])
    await until(lambda: next(iter(system.app.ledger)).progress == 1)
    if ends == "scheduler":
        system.engine.restart()
        await system.engine.until(lambda: len(system.engine.submits) == 2)
        system.engine.tokens(system.engine.submits[1].attempt_id, [(5, "a")])
    else:
        system.engine.cut()
        await system.engine.until(lambda: system.engine.has_call(2))
    reading = asyncio.create_task(read_all(system.generation.Resume(resume_request(told))))
    system.engine.tokens(system.engine.submits[-1].attempt_id, [(6, "b")])
    system.engine.finish(system.engine.submits[-1].attempt_id, common_pb2.FINISH_REASON_LENGTH)
    assert joined(await reading) == ("ab", [5, 6])
    await system.until_idle()
