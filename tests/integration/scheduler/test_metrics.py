import grpc
import pytest

from tests.integration.scheduler.stand import EPOCH, Stand, scheduler


def metric(stand: Stand, name: str, **labels: str) -> float | None:
    return stand.runtime.registry.get_sample_value(f"tailrace_scheduler_{name}", labels)


async def test_what_was_accepted_is_what_ended_and_open_gauges_read_0() -> None:
    async with scheduler(kv_tokens=1600, fake_pace_ms=2.0) as stand, stand.tokens() as reader:
        for attempt_id in (1, 2, 3):
            await stand.submit(attempt_id, max_tokens=4 if attempt_id < 3 else 1000)
        await reader.read_ends(1, 2)
        assert metric(stand, "running") == 1
        assert metric(stand, "log_sequences") == 3
        await stand.abort(3)
        await reader.read_ends(3)
        await stand.release(1, 2, 3)
        await stand.idle()
        assert metric(stand, "accepted_total") == 3
        assert metric(stand, "ended_total", reason="LENGTH") == 2
        assert metric(stand, "ended_total", reason="ABORTED") == 1
        for gauge in ("waiting", "running", "blocks_cached", "log_sequences"):
            assert metric(stand, gauge) == 0, gauge
        assert metric(stand, "blocks_free") == metric(stand, "blocks_capacity") == 100
        assert metric(stand, "tombstones") == 3
        assert metric(stand, "integrity_failures_total") == 0


async def test_steps_and_tokens_are_counted_by_kind() -> None:
    async with scheduler(max_running=4, max_step_tokens=16) as stand, stand.tokens() as reader:
        await stand.submit(1, prompt_ids=[20] * 40, max_tokens=5)
        await reader.read_ends(1)
        await stand.idle()
        assert metric(stand, "prompt_tokens_total") == 40
        assert metric(stand, "output_tokens_total") == 5
        assert metric(stand, "step_seconds_count", kind="prefill") == 3
        assert metric(stand, "step_seconds_count", kind="decode") == 4
        assert metric(stand, "queue_seconds_count") == 1


async def test_claims_stale_owners_and_leases_that_ended_are_counted() -> None:
    async with scheduler(fake_pace_ms=5.0, lease_grace_s=0.2) as stand:
        await stand.submit(1, max_tokens=8000)
        await stand.claim("r-1", EPOCH + 1)
        with pytest.raises(grpc.aio.AioRpcError):
            await stand.submit(2, request_id="r-1")
        await stand.released(1)
        counts = [metric(stand, f"{name}_total") for name in ("claims", "stale_owner", "leases_expired")]
        assert counts == [1, 1, 1]


async def test_refusals_are_counted_by_their_reason() -> None:
    async with scheduler(max_running=1, max_waiting=0, max_step_tokens=64, fake_pace_ms=5.0) as stand:
        await stand.submit(1, max_tokens=1000)
        with pytest.raises(grpc.aio.AioRpcError):
            await stand.submit(2)
        assert metric(stand, "refused_total", reason="QUEUE_FULL") == 1
        await stand.release(1)
