import asyncio

from services.protocol.outbox import Outbox
from services.protocol.sender import Sender, Wakeup


async def test_what_comes_during_a_write_is_merged_into_the_next_message() -> None:
    pending: list[int] = [1]
    written: list[list[int]] = []
    second = asyncio.Event()

    def take() -> list[int] | None:
        taken = pending.copy()
        pending.clear()
        return taken or None

    sender: Sender[list[int]] = Sender(take, list, heartbeat_s=60)

    async def write(message: list[int]) -> None:
        written.append(message)
        if len(written) == 1:
            pending.extend([2, 3])
            sender.wake()
        else:
            second.set()

    async with asyncio.timeout(5):
        task = asyncio.create_task(sender.run(write))
        await second.wait()
        task.cancel()
    assert written == [[1], [2, 3]]


async def test_silence_is_broken_by_a_heartbeat() -> None:
    beats: asyncio.Queue[str] = asyncio.Queue()
    sender = Sender(lambda: None, lambda: "beat", heartbeat_s=0.001)
    async with asyncio.timeout(5):
        task = asyncio.create_task(sender.run(beats.put))
        assert [await beats.get(), await beats.get()] == ["beat", "beat"]
        task.cancel()


async def test_news_that_gives_no_message_does_not_put_the_heartbeat_off() -> None:
    beats: asyncio.Queue[str] = asyncio.Queue()
    sender = Sender(lambda: None, lambda: "beat", heartbeat_s=0.02)

    async def news_all_the_time() -> None:
        while True:
            sender.wake()
            await asyncio.sleep(0.001)

    async with asyncio.timeout(5):
        tasks = [asyncio.create_task(sender.run(beats.put)), asyncio.create_task(news_all_the_time())]
        assert [await beats.get(), await beats.get()] == ["beat", "beat"]
        for task in tasks:
            task.cancel()


async def test_a_message_tells_since_when_its_oldest_news_has_waited() -> None:
    clock = asyncio.get_running_loop().time
    pieces = iter([None, "first", "second", "rest of the second"])
    told: list[int] = []
    done = asyncio.Event()
    sender: Sender[str] = Sender(lambda: next(pieces, None), str, heartbeat_s=60)

    async def write(message: str) -> None:
        told.append(sender.news_us)
        if message == "first":
            sender.wake()
            await asyncio.sleep(0.03)  # the transport is full; what waits meanwhile was new before this
            sender.wake()
        done.set() if message.startswith("rest") else None

    async with asyncio.timeout(5):
        task = asyncio.create_task(sender.run(write))
        await asyncio.sleep(0)
        before_us = clock() * 1e6
        sender.wake()
        await done.wait()
        task.cancel()
    first, second, rest = told
    assert 0 <= first - before_us < 20_000
    assert second - first < 20_000, "since the first of it was new, not since it could be written"
    assert rest == second


async def test_news_before_the_wait_is_not_lost() -> None:
    wakeup = Wakeup()
    wakeup.set()
    assert await wakeup.wait(60)
    assert not await wakeup.wait(0.001)


def test_live_sequences_come_before_replayed_ones() -> None:
    outbox = Outbox(replay=["old-1", "old-2"])
    outbox.mark("live")
    outbox.mark_all(["live", "other"])
    assert len(outbox) == 4
    assert outbox.take_live() == ["live", "other"]
    assert outbox.take_replay() == "old-1"
    outbox.mark("live")
    assert outbox.take_live() == ["live"]
    assert outbox.take_replay() == "old-2"
    assert outbox.take_replay() is None
    assert not outbox
