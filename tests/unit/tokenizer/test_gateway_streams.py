from __future__ import annotations

import pytest

from services.protocol.answer import AnswerLog
from services.protocol.events import Finish, FinishReason, TokenInfo, TopLogprob, Usage
from services.protocol.sender import MAX_BATCH_BYTES
from services.runtime.error_tree import AlreadyExists, InvalidRequest, Superseded, Unavailable
from services.tokenizer.columns import EventColumns
from services.tokenizer.entry import Entry
from services.tokenizer.gateway_streams import MAX_BURIED, GatewayCall, Gateways, Readiness
from services.tokenizer.wire import event_batch_to_wire
from tests.unit.tokenizer.world import World


class Book:
    """Gateways whose ended streams are written down, and entries to read."""

    def __init__(self) -> None:
        self.world = World()
        self.ended: list[tuple[Entry, bool]] = []
        self.gateways = Gateways(lambda entry, delivered: self.ended.append((entry, delivered)), grace_s=30.0)

    def connect(self, epoch: int) -> GatewayCall:
        """A call that has told its readiness, which stands before everything else."""
        call = self.gateways.connect(epoch)
        assert isinstance(call.take(), Readiness)
        return call

    def entry(self, request_id: str, text: str = "", infos: int = 0) -> Entry:
        """An entry with one token per character, each with this much token-level output."""
        caller = self.world.open(request_id)
        assert caller is not None
        caller.entry.drop(caller)
        for at, char in enumerate(text):
            tokens = [TokenInfo(5, b"x", -1.0, (TopLogprob(5, -1.0, b"x"),) * 20)] if infos else []
            caller.entry.log.choices[0].append(at, [5], at, char, tokens)
        return caller.entry

    def large_entry(self, n: int, tokens: int) -> Entry:
        """A whole answer of `n` choices, with all alternatives of each token."""
        entry = self.entry("large")
        entry.log = AnswerLog(n)
        info = TokenInfo(49151, b"token", -1.25, (TopLogprob(49151, -1.25, b"token"),) * 20)
        for choice, log in enumerate(entry.log.choices):
            log.append(0, [49151] * tokens, 0, "token" * tokens, [info] * tokens)
            entry.log.finish(Finish(choice, FinishReason.LENGTH, tokens))
        entry.log.complete(Usage(1, 0, n * tokens))
        return entry


@pytest.fixture
async def book() -> Book:
    return Book()


async def test_a_gateway_is_known_from_its_first_call_until_its_grace_is_over(book: Book) -> None:
    with pytest.raises(Unavailable):
        book.gateways.get(1)
    call = book.connect(1)
    entry = book.entry("a")
    book.gateways.get(1).add(5, entry)
    book.gateways.expire(1e9)
    book.gateways.disconnect(1, call, now=100.0)
    book.gateways.expire(129.9)
    assert book.ended == []
    book.gateways.expire(130.0)
    assert book.ended == [(entry, False)]
    assert entry.readers == []
    with pytest.raises(Unavailable):
        book.gateways.get(1)


async def test_a_gateway_is_told_the_readiness_at_once_and_whenever_it_changes(book: Book) -> None:
    book.gateways.tell(Readiness(False, "the model is being loaded"))
    call = book.gateways.connect(1)
    assert call.take() == Readiness(False, "the model is being loaded")
    assert call.take() is None
    book.gateways.tell(Readiness(True))
    book.gateways.tell(Readiness(True))
    assert call.take() == Readiness(True)
    assert call.take() is None


async def test_a_call_that_was_superseded_ends_and_its_end_does_not_start_the_grace(book: Book) -> None:
    older = book.connect(1)
    newer = book.connect(1)
    with pytest.raises(Superseded):
        older.take()
    book.gateways.disconnect(1, older, now=100.0)
    book.gateways.expire(1e9)
    assert book.gateways.get(1).call is newer


async def test_a_call_that_is_closed_ends_after_the_last_event(book: Book) -> None:
    call = book.connect(1)
    book.gateways.get(1).add(5, book.entry("a", "ab")).mark()
    book.gateways.close()
    assert _taken(call.take()) == [(5, 0, "ab")]
    with pytest.raises(Unavailable):
        call.take()


async def test_a_gateway_must_say_which_incarnation_it_is(book: Book) -> None:
    with pytest.raises(InvalidRequest, match=r"gateway\.epoch"):
        book.gateways.connect(0)


async def test_a_stream_ends_once_however_often_it_is_released(book: Book) -> None:
    book.gateways.connect(1)
    entry = book.entry("a")
    gateway = book.gateways.get(1)
    gateway.add(5, entry)
    with pytest.raises(AlreadyExists):
        gateway.check_new(5)
    for _ in range(3):
        book.gateways.release(1, 5, delivered=True)
    book.gateways.release(1, 6, delivered=True)
    book.gateways.release(2, 5, delivered=True)
    assert book.ended == [(entry, True)]


async def test_a_release_before_the_event_stream_is_refused_so_that_it_comes_again(book: Book) -> None:
    # A restarted tokenizer would forget it, and then take the Open that it overtook (simulation, seed 7623).
    with pytest.raises(Unavailable, match="StreamEvents"):
        book.gateways.release(99, 5, delivered=False)


async def test_a_release_that_overtakes_its_open_keeps_it_out(book: Book) -> None:
    book.gateways.connect(1)
    gateway = book.gateways.get(1)
    book.gateways.release(1, 5, delivered=False)
    with pytest.raises(Superseded):
        gateway.check_new(5)
    gateway.check_new(6)


async def test_the_streams_buried_are_bounded(book: Book) -> None:
    book.gateways.connect(1)
    for stream_id in range(MAX_BURIED + 1):
        book.gateways.release(1, stream_id, delivered=False)
    book.gateways.get(1).check_new(0)
    with pytest.raises(Superseded):
        book.gateways.get(1).check_new(1)


async def test_a_new_call_replays_every_stream_from_its_start_and_live_ones_go_first(book: Book) -> None:
    gateway_call = book.connect(1)
    gateway = book.gateways.get(1)
    for stream_id in (1, 2, 3):
        gateway.add(stream_id, book.entry(f"r{stream_id}", "ab")).mark()
    assert _taken(gateway_call.take()) == [(1, 0, "ab"), (2, 0, "ab"), (3, 0, "ab")]
    assert gateway_call.take() is None
    gateway_call = book.connect(1)
    gateway.streams[3].mark()
    assert _taken(gateway_call.take()) == [(3, 0, "ab"), (1, 0, "ab"), (2, 0, "ab")]
    assert gateway_call.take() is None


async def test_a_message_stays_near_its_bound_and_the_rest_comes_in_the_next(book: Book) -> None:
    call = book.connect(1)
    gateway = book.gateways.get(1)
    for stream_id in range(8):
        gateway.add(stream_id, book.entry(f"r{stream_id}", "x" * 600, infos=20)).mark()
    seen: list[tuple[int, int, str]] = []
    messages = 0
    while (columns := call.take()) is not None:
        assert columns.weight_bytes < 1.5 * MAX_BATCH_BYTES
        seen += _taken(columns)
        messages += 1
    assert messages > 1
    assert seen == [(stream_id, 0, "x" * 600) for stream_id in range(8)]


@pytest.mark.parametrize("replayed", [False, True])
async def test_one_answer_larger_than_a_message_comes_in_several_and_holds_no_other_up(
    book: Book, replayed: bool
) -> None:
    # With all alternatives it may be larger than the transport takes: the call would end, again and again.
    choices, tokens = 128, 60
    large = book.large_entry(choices, tokens)
    call, gateway = book.connect(1), book.gateways.get(1)
    gateway.add(1, large)
    gateway.add(2, book.entry("small", "ab"))
    if replayed:
        call = book.connect(1)
    else:
        gateway.streams[2].mark()
    rows: dict[int, list[int]] = {}
    messages: list[EventColumns] = []
    while (columns := call.take()) is not None:
        assert isinstance(columns, EventColumns)
        assert event_batch_to_wire(columns).ByteSize() < 1.5 * MAX_BATCH_BYTES
        for stream_id, choice, count in zip(columns.stream_ids, columns.choices, columns.token_counts, strict=True):
            if stream_id == 1:
                rows.setdefault(choice, []).append(count)
        messages.append(columns)
    assert {choice: sum(counts) for choice, counts in rows.items()} == dict.fromkeys(range(choices), tokens)
    assert [choice for columns in messages for _, finish in columns.finishes for choice in [finish.choice]] == list(
        range(choices)
    )
    assert [len(columns.completions) for columns in messages] == [0] * (len(messages) - 1) + [1]
    if not replayed:
        assert 2 in messages[1].stream_ids


def _taken(columns: EventColumns | Readiness | None) -> list[tuple[int, int, str]]:
    assert isinstance(columns, EventColumns)
    return list(zip(columns.stream_ids, columns.token_offsets, columns.texts, strict=True))
