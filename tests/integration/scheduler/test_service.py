import asyncio
from contextlib import suppress

import grpc
import pytest

from services.protocol.hello import PROTOCOL_VERSION
from services.runtime.errors import (
    InvalidRequest,
    Overloaded,
    PreconditionFailed,
    Superseded,
    Unavailable,
    from_rpc_error,
)
from tailrace.v1 import admin_pb2, common_pb2
from tests.integration.scheduler.stand import scheduler, submit_pb
from tests.unit.scheduler.driver import Driver


async def test_submitted_tokens_come_over_the_route_and_end_once() -> None:
    async with scheduler() as stand, stand.tokens() as reader:
        response = await stand.submit(1)
        await reader.read_ends(1)
        assert response.epoch == stand.runtime.epoch
        assert len(reader.ids[1, 0]) == 8
        assert reader.ends[1, 0].reason == common_pb2.FINISH_REASON_LENGTH


async def test_hello_says_who_speaks_and_what_can_be_served() -> None:
    async with scheduler(kv_tokens=4096, model_id="toy") as stand, stand.tokens() as reader:
        hello = reader.hello
        assert hello is not None
        assert hello.epoch == stand.runtime.epoch
        assert hello.protocol_version == PROTOCOL_VERSION
        assert (hello.model_id, hello.vocab_size, hello.context_length) == ("toy", 49152, 4097)


async def test_many_attempts_at_once_each_get_what_they_get_alone() -> None:
    driver = Driver()
    for attempt_id in range(1, 65):
        driver.submit(attempt_id, max_tokens=attempt_id)
    driver.run()
    async with scheduler(max_running=16, kv_tokens=2048) as stand, stand.tokens() as reader:
        await asyncio.gather(*(stand.submit(attempt_id, max_tokens=attempt_id) for attempt_id in range(1, 65)))
        await reader.read_ends(*range(1, 65))
        assert reader.ids == {name: driver.ids(*name) for name in driver.logs}
        await stand.idle()
        stand.core.check_integrity()
        load = stand.core.load()
        assert load.free_blocks + load.cached_blocks == load.total_blocks


async def test_an_abort_ends_a_running_attempt_and_leaves_its_neighbour() -> None:
    async with scheduler(fake_pace_ms=5.0) as stand, stand.tokens() as reader:
        await stand.submit(1, max_tokens=4000)
        await stand.submit(2, max_tokens=20)
        await reader.read_until(lambda r: len(r.ids[1, 0]) > 2)
        await stand.abort(1)
        await reader.read_ends(1, 2)
        assert reader.ends[1, 0].reason == common_pb2.FINISH_REASON_ABORTED
        assert reader.ends[2, 0].reason == common_pb2.FINISH_REASON_LENGTH


async def test_release_is_marked_in_the_stream_and_a_late_submit_is_refused() -> None:
    async with scheduler(fake_pace_ms=5.0) as stand, stand.tokens() as reader:
        await stand.submit(1, max_tokens=4000)
        await reader.read_until(lambda r: len(r.ids[1, 0]) > 2)
        await stand.release(1)
        await reader.read_until(lambda r: r.released == [1])
        assert (1, 0) not in reader.ends
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stand.submit(1)
        assert isinstance(from_rpc_error(refused.value), PreconditionFailed)
        await stand.idle()


async def test_a_release_that_overtakes_its_submit_wins_and_is_marked_too() -> None:
    async with scheduler() as stand, stand.tokens() as reader:
        await stand.release(5)
        await reader.read_until(lambda r: r.released == [5])
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stand.submit(5)
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION


async def test_the_same_submit_twice_runs_once() -> None:
    async with scheduler() as stand, stand.tokens() as reader:
        await asyncio.gather(stand.submit(1), stand.submit(1))
        await reader.read_ends(1)
        assert list(reader.names.values()) == [(1, 0)]
        await stand.submit(1)
        assert stand.core.open_sequences == 0


async def test_a_new_generation_replays_from_token_0_and_ends_the_older_call() -> None:
    async with scheduler(fake_pace_ms=5.0) as stand, stand.tokens(1) as old:
        await stand.submit(1, max_tokens=5)
        await stand.submit(2, max_tokens=40)
        await old.read_ends(1)
        async with stand.tokens(2) as new:
            await new.read_ends(1, 2)
            assert new.ids[1, 0] == old.ids[1, 0]
            assert new.ids[2, 0][: len(old.ids[2, 0])] == old.ids[2, 0]
            assert len(new.ids[2, 0]) == 40
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await old.read_until(lambda _: False)
        assert isinstance(from_rpc_error(ended.value), Superseded)


async def test_a_lower_generation_is_refused() -> None:
    async with scheduler() as stand, stand.tokens(3):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stand.tokens(2).__aenter__()
        assert isinstance(from_rpc_error(refused.value), Superseded)


async def test_attempts_wait_with_their_logs_for_a_route_that_is_not_open() -> None:
    async with scheduler() as stand:
        await stand.submit(1)
        await stand.idle()
        async with stand.tokens() as reader:
            await reader.read_ends(1)
            assert len(reader.ids[1, 0]) == 8


async def test_a_full_queue_answers_every_one_at_once_with_a_retry_hint() -> None:
    async with scheduler(max_running=1, max_waiting=1, max_step_tokens=64, fake_pace_ms=20.0) as stand:
        answers = await asyncio.gather(
            *(stand.submit(attempt_id, max_tokens=500) for attempt_id in range(1, 13)), return_exceptions=True
        )
        refusals = [from_rpc_error(answer) for answer in answers if isinstance(answer, grpc.aio.AioRpcError)]
        assert len(answers) - len(refusals) == 2
        assert all(isinstance(error, Overloaded) and error.reason == "QUEUE_FULL" for error in refusals)
        assert all(isinstance(error, Overloaded) and error.retry_after_s > 0 for error in refusals)
        await stand.release(*range(1, 13))
        await stand.idle()


async def test_a_deadline_that_passes_in_the_queue_is_told_as_deadline() -> None:
    async with (
        scheduler(max_running=1, max_step_tokens=64, fake_pace_ms=5.0) as stand,
        stand.tokens() as reader,
    ):
        await stand.submit(1, max_tokens=4000)
        await stand.submit(2, deadline_in_ms=50)
        await reader.read_ends(2)
        assert reader.ends[2, 0].reason == common_pb2.FINISH_REASON_DEADLINE
        assert reader.ends[2, 0].token_offset == 0
        await stand.abort(1)


async def test_a_deadline_in_decode_stops_the_work() -> None:
    async with scheduler(fake_pace_ms=5.0) as stand, stand.tokens() as reader:
        await stand.submit(1, max_tokens=4000, deadline_in_ms=100)
        await reader.read_ends(1)
        assert reader.ends[1, 0].reason == common_pb2.FINISH_REASON_DEADLINE
        await stand.idle()


async def test_a_silent_stream_sends_empty_batches() -> None:
    async with scheduler() as stand, stand.tokens() as reader:
        await reader.read_until(lambda r: r.heartbeats == 2)


async def test_a_reader_that_stands_still_holds_nobody_back_and_loses_nothing() -> None:
    async with scheduler() as stand, stand.tokens() as slow, stand.tokens(epoch=8) as fast:
        # Hundreds of kilobytes, far more than the transport takes in without a reader.
        await stand.submit(1, max_tokens=1500, logprobs=20)
        await stand.submit(2, max_tokens=1500, tokenizer_epoch=8)
        await fast.read_ends(2)
        await stand.idle()
        await slow.read_ends(1)
        assert len(slow.ids[1, 0]) == len(fast.ids[2, 0]) == 1500


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("attempt_id", {"attempt_id": 0}),
        ("tokenizer", {"tokenizer": ""}),
        ("prompt_ids", {"prompt_ids": []}),
        ("prompt_ids", {"prompt_ids": [49152]}),
        ("prompt_ids", {"prompt_ids": [2**32 - 1]}),
        ("prompt_ids", {"prompt_ids": [5] * 8192}),
        ("choices", {"choices": []}),
        ("sampling.seed", {"sampling": common_pb2.SamplingParams()}),
        ("sampling.logit_bias", {"sampling": common_pb2.SamplingParams(seed=1, logit_bias={49152: 1.0})}),
        ("stopping.max_tokens", {"max_tokens": 0}),
        ("stopping.stop_token_ids", {"stop_token_ids": [49152]}),
    ],
)
async def test_bad_input_is_refused_with_its_field_and_registers_nothing(
    field: str, changes: dict[str, object]
) -> None:
    async with scheduler() as stand:
        request = submit_pb(1, **{key: value for key, value in changes.items() if key != "attempt_id"})
        request.attempt_id = 0 if "attempt_id" in changes else 1
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stand.stub.Submit(request)
        error = from_rpc_error(refused.value)
        assert isinstance(error, InvalidRequest)
        assert error.field == field
        assert stand.core.attempts == {}


async def test_an_operator_s_flush_makes_the_next_equal_prompt_be_computed_anew() -> None:
    async with scheduler() as stand, stand.tokens() as reader:
        cached = []
        for attempt_id in (1, 2, 3):
            if attempt_id == 3:
                answer = await stand.admin.FlushPrefixCache(admin_pb2.FlushPrefixCacheRequest())
                assert answer.held_blocks == 0
            await stand.submit(attempt_id, prompt_ids=range(20, 60))
            await reader.read_ends(attempt_id)
            cached.append(reader.ends[attempt_id, 0].cached_prompt_tokens)
        assert cached == [0, 32, 0]


async def test_load_is_told_at_first_as_it_changes_and_in_silence() -> None:
    async with scheduler(fake_pace_ms=5.0, kv_tokens=1600) as stand, stand.loads() as call:
        assert (await call.read()).hello.epoch == stand.runtime.epoch
        idle = (await call.read()).load
        assert (idle.waiting_sequences, idle.running_sequences) == (0, 0)
        assert (idle.free_blocks, idle.total_blocks, idle.block_size) == (100, 100, 16)
        await stand.submit(1, max_tokens=1000)
        while not (busy := (await call.read()).load).running_sequences:
            pass
        assert busy.free_blocks < 100
        await stand.abort(1)
        while (await call.read()).load != idle:
            pass
        assert (await call.read()).load == idle


async def test_a_prompt_that_breaks_a_whole_step_ends_alone() -> None:
    async with scheduler(fake_step_error_id=99) as stand, stand.tokens() as reader:
        await asyncio.gather(stand.submit(1), stand.submit(2, prompt_ids=[20, 99]), stand.submit(3))
        await reader.read_ends(1, 2, 3)
        assert reader.ends[2, 0].reason == common_pb2.FINISH_REASON_ERROR
        assert reader.ends[2, 0].error.code == common_pb2.ERROR_CODE_INTERNAL
        assert reader.ends[1, 0].reason == reader.ends[3, 0].reason == common_pb2.FINISH_REASON_LENGTH


async def test_inspection_shows_what_is_held_and_never_prompts() -> None:
    async with scheduler(fake_pace_ms=5.0) as stand, stand.tokens() as reader:
        await stand.submit(1, max_tokens=4000)
        await stand.submit(2, max_tokens=1)
        await reader.read_until(lambda r: len(r.ids[1, 0]) > 2 and (2, 0) in r.ends)
        running, ended = await stand.views()
        assert (running.request_id, running.attempt_id, running.engine_phase) == ("r-1", 1, "DECODE")
        assert running.choices[0].blocks >= 1
        assert running.choices[0].cursor_token_offset >= 3
        assert [moment.what for moment in running.moments] == ["accepted", "admitted", "first token"]
        assert (running.route.tokenizer, running.route.generation) == ("tokenizer-1", 1)
        assert (ended.engine_phase, ended.choices[0].log_token_offset) == ("ENDED", 1)
        assert (ended.moments[-1].what, ended.choices[0].finish_reason) == ("ended", "LENGTH")
        await stand.release(1, 2)
        assert await stand.views() == []
        assert [view.attempt_id for view in await stand.views(include_ended=True)] == [1, 2]


async def test_inspection_is_answered_while_a_step_runs() -> None:
    async with scheduler(fake_prefill_us_per_token=5_000.0) as stand, stand.tokens() as reader:
        await stand.submit(1, prompt_ids=[20] * 200)
        while (view := await stand.process_view()).scheduler.step_ms < 50:
            assert not reader.ids
        assert (view.scheduler.running, view.scheduler.stalled) == (1, False)
        await reader.read_ends(1)


async def test_a_queued_attempt_says_what_it_waits_for() -> None:
    async with scheduler(fake_pace_ms=5.0, kv_tokens=64, max_running=2) as stand, stand.tokens() as reader:
        await stand.submit(1, prompt_ids=[20] * 30, max_tokens=30)
        await stand.submit(2, prompt_ids=[21] * 30, max_tokens=30)
        await reader.read_until(lambda r: len(r.ids[1, 0]) > 2)
        _, waiting = await stand.views()
        assert (waiting.engine_phase, waiting.waits_for) == ("WAITING", "BLOCKS")
        await reader.read_ends(1, 2)


async def test_inspection_pages_through_what_matches() -> None:
    async with scheduler(fake_pace_ms=5.0) as stand, stand.tokens():
        for attempt_id in range(1, 6):
            await stand.submit(attempt_id, max_tokens=4000)
        first = await stand.inspection.ListRequests(admin_pb2.ListRequestsRequest(page_size=3))
        rest = await stand.inspection.ListRequests(
            admin_pb2.ListRequestsRequest(page_size=3, page_token=first.next_page_token)
        )
        assert [view.attempt_id for view in (*first.requests, *rest.requests)] == [1, 2, 3, 4, 5]
        assert (first.total, rest.next_page_token) == (5, "")
        assert not await stand.views(phase="ENDED")
        one = await stand.inspection.GetRequest(admin_pb2.GetRequestRequest(attempt_id=4))
        assert one.request.attempt_id == 4
        await stand.release(1, 2, 3, 4, 5)


async def test_draining_refuses_new_work_finishes_the_open_and_exits_clean() -> None:
    async with scheduler(fake_pace_ms=5.0) as stand, stand.tokens() as reader:
        await stand.submit(1, max_tokens=30)
        await reader.read_until(lambda r: len(r.ids[1, 0]) > 2)
        assert (await stand.admin.Drain(admin_pb2.DrainRequest())).open_requests == 1
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stand.submit(2)
        assert isinstance(from_rpc_error(refused.value), Unavailable)
        await reader.read_ends(1)
        assert reader.ends[1, 0].reason == common_pb2.FINISH_REASON_LENGTH
        assert stand.process is not None
        assert not stand.process.done()
        await stand.release(1)
        assert await asyncio.wait_for(stand.process, 5) == 0


async def test_past_the_drain_bound_the_streams_end_by_name_and_no_end_is_invented() -> None:
    async with (
        scheduler(fake_pace_ms=5.0, drain_timeout_s=0.1) as stand,
        stand.tokens() as reader,
        stand.loads() as loads,
    ):
        await stand.submit(1, max_tokens=8000)
        await reader.read_until(lambda r: len(r.ids[1, 0]) > 2)
        stand.stop.set()
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await reader.read_until(lambda _: False)
        assert from_rpc_error(ended.value).reason == "SCHEDULER_STOPPING"
        assert reader.ends == {}
        told = []
        with suppress(grpc.aio.AioRpcError):
            while True:
                told.append((await loads.read()).load.draining)
        assert (told[0], told[-1]) == (False, True)


async def test_a_step_that_stands_still_is_not_ready_and_the_process_stays_alive() -> None:
    async with scheduler(fake_prefill_us_per_token=25_000.0, stall_timeout_s=0.2) as stand, stand.tokens() as reader:
        await stand.submit(1, prompt_ids=[20] * 100)
        seen = [status async for status in stand.health(changes=2)]
        assert seen == ["NOT_SERVING", "SERVING"]
        await reader.read_ends(1)
        assert len(reader.ids[1, 0]) == 8
