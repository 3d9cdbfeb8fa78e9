"""Claim, Reconcile and leases over real gRPC."""

import grpc
import pytest

from services.runtime.errors import InvalidRequest, NotFound, Superseded, from_rpc_error
from tailrace.v1 import common_pb2, scheduler_pb2
from tests.integration.scheduler.stand import EPOCH, TOKENIZER, scheduler
from tests.unit.scheduler.driver import alone

NEW_EPOCH = EPOCH + 1


async def test_a_claimed_request_goes_on_in_the_new_route_from_token_0_with_the_same_tokens() -> None:
    async with scheduler(fake_pace_ms=5.0) as stand, stand.tokens() as old, stand.tokens(epoch=NEW_EPOCH) as new:
        await stand.submit(1, max_tokens=40, record=b"the whole request")
        await old.read_until(lambda r: len(r.ids[1, 0]) > 3)
        claimed = await stand.claim("r-1", NEW_EPOCH)
        assert (claimed.epoch, claimed.fence, claimed.attempt_id) == (stand.runtime.epoch, 2, 1)
        assert claimed.record == b"the whole request"
        await new.read_ends(1)
        await old.read_until(lambda r: r.released == [1])
        assert new.ids[1, 0] == alone(1, max_tokens=40)
        assert new.ids[1, 0][: len(old.ids[1, 0])] == old.ids[1, 0]
        assert (old.ends, new.released) == ({}, [])
        await stand.release(1)
        await new.read_until(lambda r: r.released == [1])


async def test_a_look_at_a_request_names_its_owner_its_attempts_and_what_is_left_of_its_time() -> None:
    async with scheduler(fake_pace_ms=5.0) as stand, stand.tokens() as reader:
        request = scheduler_pb2.FindRequest(request_id="r-1")
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stand.stub.Find(request)
        assert isinstance(from_rpc_error(refused.value), NotFound)
        await stand.submit(1, max_tokens=400, record=b"the whole request", deadline_in_ms=60_000)
        await reader.read_until(lambda r: len(r.ids[1, 0]) > 3)
        found = await stand.stub.Find(request)
        assert (found.epoch, found.fence, found.tokenizer) == (stand.runtime.epoch, 1, TOKENIZER)
        assert found.owner_present
        assert (found.record, found.prompt_ids) == (b"the whole request", [20, 21, 22])
        assert 0 < found.deadline_in_ms <= 60_000
        (attempt,) = found.attempts
        assert (attempt.attempt_id, attempt.fence, attempt.attempt_number) == (1, 1, 1)
        (choice,) = attempt.choices
        assert choice.token_offset > 3
        assert not choice.ended
        await stand.release(1)


async def test_an_old_owner_that_wakes_up_is_told_so_and_changes_nothing() -> None:
    async with scheduler(fake_pace_ms=5.0) as stand, stand.tokens(epoch=NEW_EPOCH) as new:
        await stand.submit(1, max_tokens=40)
        await stand.claim("r-1", NEW_EPOCH)
        abort = scheduler_pb2.SchedulerServiceAbortRequest(
            attempt_ids=[1, 404], tokenizer=TOKENIZER, tokenizer_epoch=EPOCH
        )
        release = scheduler_pb2.SchedulerServiceReleaseRequest(
            attempt_ids=[1, 404], tokenizer=TOKENIZER, tokenizer_epoch=EPOCH
        )
        assert (await stand.stub.Abort(abort)).stale_attempt_ids == [1]
        assert (await stand.stub.Release(release)).stale_attempt_ids == [1]
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stand.submit(2, request_id="r-1")
        error = from_rpc_error(refused.value)
        assert isinstance(error, Superseded)
        assert error.reason == "STALE_OWNER"
        await new.read_ends(1)
        assert new.ids[1, 0] == alone(1, max_tokens=40)
        release.tokenizer_epoch = NEW_EPOCH
        assert (await stand.stub.Release(release)).stale_attempt_ids == []
        await stand.released(1)


async def test_a_claim_of_nothing_is_not_found_and_one_without_a_name_is_refused() -> None:
    async with scheduler() as stand:
        for request, expected in (
            ({"request_id": "r-1"}, NotFound),
            ({"request_id": ""}, InvalidRequest),
            ({"request_id": "r-1", "tokenizer": ""}, InvalidRequest),
            ({"request_id": "r-1", "attempt_number": 0}, InvalidRequest),
        ):
            fields = {"tokenizer": TOKENIZER, "tokenizer_epoch": EPOCH, "attempt_number": 1} | request
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await stand.stub.Claim(scheduler_pb2.ClaimRequest(**fields))
            assert isinstance(from_rpc_error(refused.value), expected)


async def test_reconcile_releases_the_unwanted_with_markers_and_names_the_missing() -> None:
    async with scheduler(fake_pace_ms=5.0) as stand, stand.tokens() as reader:
        for attempt_id in (1, 2, 3):
            await stand.submit(attempt_id, max_tokens=4000 if attempt_id != 2 else 8)
        answer = await stand.stub.Reconcile(
            scheduler_pb2.ReconcileRequest(
                tokenizer=TOKENIZER, tokenizer_epoch=EPOCH, highest_attempt_number=2, live_attempt_ids=[2, 77]
            )
        )
        assert answer.epoch == stand.runtime.epoch
        assert (answer.released_attempt_ids, answer.missing_attempt_ids) == ([1], [77])
        await reader.read_until(lambda r: r.released == [1] and (2, 0) in r.ends)
        assert set(stand.core.attempts) == {2, 3}
        await stand.release(2, 3)
        await stand.idle()


async def test_attempts_of_a_tokenizer_that_never_called_are_released_after_the_grace() -> None:
    async with scheduler(fake_pace_ms=5.0, lease_grace_s=0.2) as stand:
        await stand.submit(1, max_tokens=8000)
        await stand.released(1)
        await stand.idle()
        load = stand.core.load()
        assert load.free_blocks + load.cached_blocks == load.total_blocks


@pytest.mark.parametrize("kind", ["loads", "tokens"])
async def test_either_stream_holds_the_lease_and_its_end_begins_the_grace(kind: str) -> None:
    async with scheduler(lease_grace_s=0.2) as stand, stand.tokens(epoch=NEW_EPOCH) as other:
        async with stand.loads() if kind == "loads" else stand.tokens():
            await stand.submit(1)
            # Two heartbeats of another route last longer than the grace.
            await other.read_until(lambda r: r.heartbeats == 2)
            assert set(stand.core.attempts) == {1}
        await stand.released(1)


async def test_a_claimed_attempt_outlives_its_first_owner() -> None:
    async with scheduler(fake_pace_ms=5.0, lease_grace_s=0.2) as stand, stand.tokens(epoch=NEW_EPOCH) as new:
        await stand.submit(1, max_tokens=60)
        await stand.submit(2, max_tokens=8000)
        await stand.claim("r-1", NEW_EPOCH)
        await stand.released(2)
        await new.read_ends(1)
        assert new.ends[1, 0].reason == common_pb2.FINISH_REASON_LENGTH
        assert set(stand.core.attempts) == {1}
