"""Lifecycle scenarios that are the tokenizer's: each one hung, leaked or crashed a well-known server."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import pytest

from services.runtime.errors import AlreadyExists, InvalidRequest, Overloaded, Superseded, Unavailable, from_rpc_error
from services.runtime.phase import Phase
from tailrace.v1 import common_pb2, detokenizer_pb2, generation_pb2, tokenizer_pb2
from tests.integration.tokenizer.conftest import System, started
from tests.integration.tokenizer.gateway import Gateway

Options = generation_pb2.GenerationOptions
ABORTING, ALREADY_FINISHED, NOT_FOUND = (
    generation_pb2.ABORT_OUTCOME_ABORTING,
    generation_pb2.ABORT_OUTCOME_ALREADY_FINISHED,
    generation_pb2.ABORT_OUTCOME_NOT_FOUND,
)


async def refusal(call: Any) -> Exception:
    """What the call is refused with."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return from_rpc_error(caught.value)


async def until(condition: Callable[[], object]) -> None:
    """Waits until a condition of the process under test holds, which has nothing else to wait for."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def abort(system: System, request_id: str, *, wait: bool = False, tenant: str = "") -> int:
    response = await system.tokenizer.Abort(
        tokenizer_pb2.TokenizerServiceAbortRequest(tenant=tenant, request_id=request_id, wait_until_released=wait)
    )
    return response.outcome


async def test_a_caller_that_leaves_in_decode_is_released_at_once(system: System, gateway: Gateway) -> None:
    await gateway.open(1)
    attempt_id = system.engine.submits[0].attempt_id
    system.engine.tokens(attempt_id, [(5, "a")])
    await gateway.release(1, delivered=False)
    await system.engine.until(lambda: system.engine.released == [attempt_id])
    await system.until_idle()
    await gateway.release(1, delivered=False)


async def test_a_direct_caller_that_cancels_is_released_at_once(system: System) -> None:
    call: Any = system.generation.Generate(generation_pb2.GenerateRequest(text="abc"))
    assert (await call.read()).HasField("started")
    call.cancel()
    await system.engine.until(lambda: system.engine.released == [system.engine.submits[0].attempt_id])
    await system.until_idle()


async def test_a_caller_that_leaves_while_submit_is_on_its_way_leaves_nothing(system: System, gateway: Gateway) -> None:
    system.engine.hold_submit = asyncio.Event()
    opening = asyncio.ensure_future(gateway.open(1))
    await until(system.app.open_requests)
    await gateway.release(1, delivered=False)
    assert isinstance(await refusal(opening), Superseded)
    await system.engine.until(lambda: system.engine.released)
    system.engine.hold_submit.set()
    await system.until_idle()
    assert system.engine.sequences == {}


async def test_a_release_that_overtakes_its_open_leaves_nothing(system: System, gateway: Gateway) -> None:
    await gateway.release(1, delivered=False)
    assert isinstance(await refusal(gateway.open(1)), Superseded)
    assert system.engine.submits == []
    assert system.app.open_requests() == 0


async def test_an_aborted_id_can_be_used_again_at_once_and_the_first_abort_does_not_touch_it(
    system: System, gateway: Gateway
) -> None:
    system.engine.ends_on_abort = False
    await gateway.open(1, request_id="x")
    assert await abort(system, "x") == ABORTING
    await gateway.open(2, request_id="x")
    first, second = system.engine.submits
    await system.engine.until(lambda: system.engine.aborted == [first.attempt_id])
    system.engine.finish(first.attempt_id, common_pb2.FINISH_REASON_ABORTED)
    system.engine.answer(second.attempt_id, "second")
    assert (await gateway.completed(1)).finishes[0].reason == common_pb2.FINISH_REASON_ABORTED
    assert (await gateway.completed(2)).texts == {0: "second"}


async def test_a_live_duplicate_with_other_content_is_refused_before_anything_is_registered(
    system: System, gateway: Gateway
) -> None:
    await gateway.open(1, request_id="x")
    assert isinstance(await refusal(gateway.open(2, request_id="x", text="other")), AlreadyExists)
    assert len(system.engine.submits) == system.app.open_requests() == 1
    system.engine.answer(system.engine.submits[0].attempt_id, "intact")
    assert (await gateway.completed(1)).texts == {0: "intact"}


async def test_abort_tells_the_truth_and_touches_no_other_request(system: System, gateway: Gateway) -> None:
    await gateway.open(1, request_id="req-10")
    assert await abort(system, "req-1") == NOT_FOUND
    assert await abort(system, "") == NOT_FOUND
    assert await abort(system, "req-10", tenant="other") == NOT_FOUND
    assert system.engine.aborted == []
    system.engine.answer(system.engine.submits[0].attempt_id, "whole")
    assert (await gateway.completed(1)).texts == {0: "whole"}
    assert await abort(system, "req-10") == ALREADY_FINISHED
    await gateway.release(1)
    await system.until_idle()
    assert await abort(system, "req-10") == NOT_FOUND


async def test_an_abort_flushes_what_the_engine_gave_and_waits_until_nothing_is_remembered(
    system: System, gateway: Gateway
) -> None:
    await gateway.open(1, request_id="x")
    system.engine.tokens(system.engine.submits[0].attempt_id, [(5, "so far")])
    waiting = asyncio.ensure_future(abort(system, "x", wait=True))
    stream = await gateway.completed(1)
    assert stream.texts == {0: "so far"}
    assert stream.finishes[0].reason == common_pb2.FINISH_REASON_ABORTED
    assert not waiting.done()
    await gateway.release(1)
    assert await waiting == ABORTING
    assert system.app.open_requests() == 0


async def test_an_abort_that_the_engine_does_not_follow_ends_the_request_all_the_same(
    system: System, gateway: Gateway
) -> None:
    system.engine.ends_on_abort = False
    await gateway.open(1, request_id="x")
    assert await abort(system, "x") == ABORTING
    stream = await gateway.completed(1)
    assert stream.finishes[0].reason == common_pb2.FINISH_REASON_ABORTED
    await system.engine.until(lambda: system.engine.released)


async def test_a_deadline_is_handed_on_as_a_duration_and_kept_when_the_engine_does_not(
    system: System, gateway: Gateway
) -> None:
    await gateway.open(1, options=Options(timeout_ms=200))
    assert 100 <= system.engine.submits[0].deadline_in_ms <= 200
    stream = await gateway.completed(1)
    assert stream.finishes[0].reason == common_pb2.FINISH_REASON_DEADLINE
    await system.engine.until(lambda: system.engine.released)


async def test_the_callers_own_deadline_ends_the_request_a_little_earlier(system: System, gateway: Gateway) -> None:
    await gateway.open(1, deadline_in_ms=1000)
    assert 800 <= system.engine.submits[0].deadline_in_ms <= 900


async def test_bad_requests_among_good_ones_are_refused_alone(system: System, gateway: Gateway) -> None:
    system.engine.on_submit = lambda request: system.engine.answer(request.attempt_id, "ok")
    long = await refusal(gateway.open(99, text="x" * 600))
    assert isinstance(long, InvalidRequest)
    assert long.field == "text"
    assert "601" in long.message
    assert "512" in long.message
    exact = await refusal(gateway.open(98, token_ids=generation_pb2.TokenIds(ids=[5] * 512), text=None))
    assert isinstance(exact, InvalidRequest)
    assert exact.field == "token_ids.ids"
    assert system.app.open_requests() == 0
    await asyncio.gather(*(gateway.open(number) for number in range(9)))
    for number in range(9):
        assert (await gateway.completed(number)).texts == {0: "ok"}


async def test_a_prompt_one_shorter_than_the_context_leaves_one_token(system: System, gateway: Gateway) -> None:
    await gateway.open(1, token_ids=generation_pb2.TokenIds(ids=[5] * 511), text=None)
    assert system.engine.submits[0].stopping.max_tokens == 1


async def test_more_live_requests_than_the_ledger_holds_are_refused_and_none_is_evicted(
    tiny_model: Path,
) -> None:
    async with started(tiny_model, max_open_requests=2) as system:
        gateway = Gateway(system.tokenizer)
        await gateway.connect()
        await gateway.open(1)
        await gateway.open(2)
        assert isinstance(await refusal(gateway.open(3)), Overloaded)
        for submit in list(system.engine.submits):
            system.engine.answer(submit.attempt_id, "ok")
        assert (await gateway.completed(1)).texts == (await gateway.completed(2)).texts == {0: "ok"}
        await gateway.release(1, 2)
        await system.until_idle()
        await gateway.open(4)
        await gateway.disconnect()


async def test_a_full_scheduler_is_an_answer_and_leaves_nothing(system: System, gateway: Gateway) -> None:
    system.engine.refusal = Overloaded("the queue is full", 2.0, reason="QUEUE_FULL")
    error = await refusal(gateway.open(1))
    assert isinstance(error, Overloaded)
    assert (error.reason, error.retry_after_s) == ("QUEUE_FULL", 2.0)
    await system.until_idle()
    assert system.engine.released == []


async def test_a_lost_route_is_replayed_and_the_caller_sees_nothing_of_it(system: System, gateway: Gateway) -> None:
    await gateway.open(1)
    attempt_id = system.engine.submits[0].attempt_id
    system.engine.tokens(attempt_id, [(5, "a"), (6, "b")])
    await gateway.until(lambda: 1 in gateway.streams and gateway.streams[1].texts == {0: "ab"})
    for generation in (2, 3, 4):
        system.engine.cut()
        await system.engine.until(partial(system.engine.has_call, generation))
    system.engine.answer(attempt_id, "c")
    stream = await gateway.completed(1)
    assert stream.texts == {0: "abc"}
    await gateway.release(1)
    await system.until_idle()


async def test_a_silent_route_is_given_up_and_opened_again(system: System, gateway: Gateway) -> None:
    await gateway.open(1)
    system.engine.calls[0].silent = True
    system.engine.answer(system.engine.submits[0].attempt_id, "heard")
    assert (await gateway.completed(1)).texts == {0: "heard"}
    assert system.engine.calls[0].generation == 2


async def test_another_account_of_the_same_output_ends_the_request_with_an_integrity_error(
    system: System, gateway: Gateway
) -> None:
    await gateway.open(1)
    attempt_id = system.engine.submits[0].attempt_id
    system.engine.tokens(attempt_id, [(5, "a")])
    await gateway.until(lambda: 1 in gateway.streams)
    system.engine.sequences[attempt_id, 0].pieces = [(6, "b")]
    system.engine.cut()
    stream = await gateway.completed(1)
    assert stream.texts == {0: "a"}
    assert stream.finishes[0].error.code == common_pb2.ERROR_CODE_INTEGRITY
    await system.engine.until(lambda: system.engine.released == [attempt_id])


async def test_a_gap_inside_a_call_opens_the_next_one_and_loses_nothing(system: System, gateway: Gateway) -> None:
    await gateway.open(1)
    attempt_id = system.engine.submits[0].attempt_id
    call = system.engine.calls[0]
    number = call.numbers[attempt_id, 0]
    system.engine.sequences[attempt_id, 0].pieces = [(5, "a"), (6, "b")]
    system.engine.batch(
        detokenizer_pb2.TextBatch(sequences=[number], token_offsets=[1], token_ids=[6], text_offsets=[1], texts=["b"])
    )
    await system.engine.until(partial(system.engine.has_call, call.generation + 1))
    system.engine.answer(attempt_id, "c")
    assert (await gateway.completed(1)).texts == {0: "abc"}


async def test_a_restarted_scheduler_goes_on_where_the_dead_one_stopped(system: System, gateway: Gateway) -> None:
    await gateway.open(1, options=Options(timeout_ms=60_000))
    system.engine.tokens(system.engine.submits[0].attempt_id, [(5, "a"), (6, "b")])
    await gateway.until(lambda: 1 in gateway.streams and gateway.streams[1].ids == {0: [5, 6]})
    system.engine.restart()
    await system.engine.until(lambda: len(system.engine.submits) == 2)
    first, second = system.engine.submits
    assert (first.attempt_number, second.attempt_number) == (1, 2)
    assert first.attempt_id != second.attempt_id
    assert [list(choice.output_ids) for choice in second.choices] == [[5, 6]]
    assert (second.sampling, second.stopping) == (first.sampling, first.stopping)
    assert 0 < second.deadline_in_ms <= first.deadline_in_ms
    system.engine.tokens(second.attempt_id, [(5, "a"), (6, "b"), (7, "c")])
    system.engine.finish(second.attempt_id)
    stream = await gateway.completed(1)
    assert stream.texts == {0: "abc"}
    assert stream.completed is not None
    assert stream.completed.usage.output_tokens == 3
    await gateway.release(1)
    await system.until_idle()


async def test_a_replay_by_another_scheduler_that_differs_ends_as_an_integrity_error(
    system: System, gateway: Gateway
) -> None:
    await gateway.open(1)
    system.engine.tokens(system.engine.submits[0].attempt_id, [(5, "a")])
    await gateway.until(lambda: 1 in gateway.streams)
    system.engine.restart()
    await system.engine.until(lambda: len(system.engine.submits) == 2)
    system.engine.tokens(system.engine.submits[1].attempt_id, [(6, "b")])
    stream = await gateway.completed(1)
    assert stream.texts == {0: "a"}
    assert stream.finishes[0].error.code == common_pb2.ERROR_CODE_INTEGRITY


async def test_a_caller_who_wants_no_failover_is_told_that_the_engine_was_lost_and_new_requests_are_served(
    system: System, gateway: Gateway
) -> None:
    await gateway.open(1, options=Options(failover=generation_pb2.FAILOVER_NEVER))
    attempt_id = system.engine.submits[0].attempt_id
    system.engine.tokens(attempt_id, [(5, "a")])
    await gateway.until(lambda: 1 in gateway.streams)
    system.engine.restart()
    stream = await gateway.completed(1)
    assert stream.texts == {0: "a"}
    assert stream.finishes[0].error.code == common_pb2.ERROR_CODE_ENGINE_LOST
    system.engine.on_submit = lambda request: system.engine.answer(request.attempt_id, "new")
    await until(lambda: system.runtime.ready)
    await gateway.open(2)
    assert (await gateway.completed(2)).texts == {0: "new"}
    await gateway.release(1, 2)
    await system.until_idle()


async def test_what_a_scheduler_holds_and_nobody_wants_is_released(system: System) -> None:
    system.engine.batch(detokenizer_pb2.TextBatch(starts=[detokenizer_pb2.TextStart(sequence=900, attempt_id=31)]))
    await system.engine.until(lambda: system.engine.released == [31])


async def test_draining_refuses_new_requests_and_finishes_open_ones(tiny_model: Path) -> None:
    async with started(tiny_model, drain_timeout_s=20) as system:
        gateway = Gateway(system.tokenizer)
        await gateway.connect()
        await gateway.open(1)
        system.stop.set()
        await until(lambda: system.runtime.phase is Phase.DRAINING)
        assert isinstance(await refusal(gateway.open(2)), Unavailable)
        system.engine.answer(system.engine.submits[0].attempt_id, "finished")
        assert (await gateway.completed(1)).texts == {0: "finished"}
        await gateway.release(1)
        assert await system.running == 0
        await gateway.disconnect()


async def test_past_the_bound_of_a_drain_streams_are_cut_by_name_and_requests_stay_at_their_scheduler(
    tiny_model: Path,
) -> None:
    async with started(tiny_model, drain_timeout_s=0.1) as system:
        gateway = Gateway(system.tokenizer)
        await gateway.connect()
        await gateway.open(1)
        direct: Any = system.generation.Generate(generation_pb2.GenerateRequest(text="abc"))
        assert (await direct.read()).HasField("started")
        system.stop.set()
        await gateway.until(lambda: gateway.cuts)
        assert gateway.cuts == {1: tokenizer_pb2.CUT_REASON_LEFT}
        assert gateway.streams == {}
        with pytest.raises(grpc.aio.AioRpcError) as cut:
            await direct.read()
        error = from_rpc_error(cut.value)
        assert (type(error), error.reason) == (Unavailable, "STREAM_CUT")
        assert await system.running == 0
        assert system.engine.released == []
        await gateway.disconnect()


async def test_each_reconnect_reconciles_and_what_is_missing_is_continued(system: System, gateway: Gateway) -> None:
    await system.engine.until(lambda: len(system.engine.reconciles) == 1)
    await gateway.open(1)
    first = system.engine.submits[0].attempt_id
    system.engine.sequences.clear()
    system.engine.cut()
    await system.engine.until(lambda: len(system.engine.reconciles) == 2)
    assert list(system.engine.reconciles[1].live_attempt_ids) == [first]
    assert system.engine.reconciles[1].highest_attempt_number == 1
    await system.engine.until(lambda: len(system.engine.submits) == 2)
    system.engine.answer(system.engine.submits[1].attempt_id, "continued")
    assert (await gateway.completed(1)).texts == {0: "continued"}
    await gateway.release(1)
    await system.until_idle()


async def test_one_lease_is_held_as_long_as_the_process_lives(tiny_model: Path) -> None:
    async with started(tiny_model) as system:
        await until(lambda: system.engine.leases == 1)
        system.engine.cut()
        await system.engine.until(lambda: system.engine.has_call(2))
        assert system.engine.leases == 1
        engine = system.engine
    await until(lambda: engine.leases == 0)
