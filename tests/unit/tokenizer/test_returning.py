"""Callers who come back, and answers that are kept for them."""

from __future__ import annotations

import pytest

from services.protocol.events import AbortOutcome, FinishReason
from services.protocol.request import IdsPrompt, OnDisconnect, ValidRequest
from services.runtime.error_tree import AlreadyExists, NotFound, Overloaded
from services.tokenizer.retention import PROMPT_TOKEN_BYTES, Retention
from services.tokenizer.state import CallerPhase
from tests.unit.tokenizer.test_failover import accept, running
from tests.unit.tokenizer.world import TTL_S, Caller, World

DETACH = OnDisconnect.DETACH


@pytest.fixture
def world() -> World:
    world = World()
    world.connect()
    return world


def complete(world: World) -> None:
    """Every answer becomes whole."""
    for sequence in world.running():
        world.end(sequence, FinishReason.STOP)
    accept(world)


def left(world: World, caller: Caller) -> CallerPhase:
    """Where the request stands once its caller has left."""
    world.leave(caller)
    return caller.entry.caller


def test_a_detached_request_goes_on_and_is_taken_up_where_its_caller_stood(world: World) -> None:
    caller = running(world, tokens=2, on_disconnect=DETACH)
    assert left(world, caller) is CallerPhase.DETACHED
    world.generate(world.running()[0])
    complete(world)
    assert world.come_back(caller, count=1)
    assert caller.entry.log.choices[0].token_ids == [100, 101, 102]
    world.deliver(caller)
    world.settle()
    assert caller.forgotten == 1


def test_a_detached_request_is_aborted_once_nobody_came_back_in_time(world: World) -> None:
    caller = running(world, tokens=1, on_disconnect=DETACH)
    world.leave(caller)
    world.pass_time(TTL_S - 0.1)
    assert not caller.entry.completed
    world.pass_time(0.2)
    assert caller.entry.caller is CallerPhase.GONE
    assert list(world.releases) == [caller.entry.attempts[0].attempt_id]
    assert not world.come_back(caller, 0)


def test_a_request_names_its_own_time_to_be_waited_for(world: World) -> None:
    caller = running(world, on_disconnect=DETACH, detach_ttl_ms=500)
    world.leave(caller)
    world.pass_time(0.6)
    assert caller.entry.caller is CallerPhase.GONE


def test_one_who_comes_back_and_leaves_again_is_waited_for_anew(world: World) -> None:
    caller = running(world, on_disconnect=DETACH)
    for _ in range(3):
        world.leave(caller)
        world.pass_time(TTL_S - 1)
        assert world.come_back(caller, 99)
    world.pass_time(2 * TTL_S)
    assert caller.entry.caller is CallerPhase.OPEN


def test_a_finished_answer_is_kept_as_long_as_was_asked_and_released_at_its_scheduler(world: World) -> None:
    caller = running(world, tokens=1, retain_ms=3000)
    complete(world)
    world.deliver(caller)
    assert caller.entry.caller is CallerPhase.DETACHED
    world.arrive_release(next(iter(world.releases)))
    accept(world)
    assert caller.entry.attempts[0].released
    world.pass_time(2.9)
    assert world.come_back(caller, 0)
    world.deliver(caller)
    world.pass_time(0.2)
    assert caller.forgotten == 1
    assert world.retention.reserved_bytes == 0


def test_an_answer_that_became_whole_while_detached_is_kept_from_its_end(world: World) -> None:
    caller = running(world, on_disconnect=DETACH, detach_ttl_ms=1000, retain_ms=5000)
    world.leave(caller)
    world.pass_time(0.9)
    complete(world)
    world.pass_time(4.9)
    assert caller.entry.caller is CallerPhase.DETACHED
    world.pass_time(0.2)
    assert caller.entry.caller is CallerPhase.GONE


def test_a_caller_who_leaves_before_the_end_is_not_waited_for_unless_it_said_so(world: World) -> None:
    caller = running(world, retain_ms=3000)
    assert left(world, caller) is CallerPhase.GONE


def test_a_request_lives_while_anybody_reads_it(world: World) -> None:
    caller = running(world, tokens=1)
    other = Caller(caller.entry, caller.cursor)
    caller.entry.readers.append(other)
    world.ledger.attach(caller.entry)
    assert left(world, caller) is CallerPhase.OPEN
    assert left(world, other) is CallerPhase.GONE


def test_an_id_a_tenant_and_a_token_have_to_fit_and_what_does_not_is_not_told_apart(world: World) -> None:
    caller = running(world, on_disconnect=DETACH)
    token = caller.entry.started.resume_token
    messages = set()
    for tenant, request_id, proof in (("t", "r", b"x" * 16), ("u", "r", token), ("t", "r", b"")):
        with pytest.raises(NotFound) as caught:
            world.ledger.resumable(tenant, request_id, proof)
        messages.add(caught.value.message)
    assert len(messages) == 1
    with pytest.raises(NotFound):
        world.ledger.resumable("t", "unknown", b"")
    assert world.ledger.resumable("t", "r", token) is caller.entry


def test_the_same_request_is_found_while_it_runs_and_while_it_is_kept_and_other_content_is_refused(
    world: World,
) -> None:
    caller = running(world, retain_ms=3000)
    asked = caller.entry.pinned.asked
    other = ValidRequest(request_id="r", prompt=IdsPrompt((9,)))
    assert world.ledger.find("t", asked) is caller.entry
    assert world.ledger.find("u", other) is None
    complete(world)
    world.deliver(caller)
    assert world.ledger.find("t", asked) is caller.entry
    with pytest.raises(AlreadyExists):
        world.ledger.find("t", other)
    world.pass_time(3.1)
    assert world.ledger.find("t", other) is None


def test_an_aborted_detached_request_is_gone_at_once_and_a_kept_answer_stays(world: World) -> None:
    detached = running(world, request_id="d", on_disconnect=DETACH)
    world.leave(detached)
    assert world.ledger.abort("t", "d", world.now)[0] is AbortOutcome.ABORTING
    assert detached.entry.caller is CallerPhase.GONE
    kept = running(world, request_id="k", retain_ms=3000)
    complete(world)
    world.deliver(kept)
    assert world.ledger.abort("t", "k", world.now)[0] is AbortOutcome.ALREADY_FINISHED
    assert kept.entry.caller is CallerPhase.DETACHED


def test_draining_waits_for_no_answer_that_is_only_kept(world: World) -> None:
    kept = running(world, request_id="k", retain_ms=60_000)
    complete(world)
    world.deliver(kept)
    detached = running(world, request_id="d", tokens=1, on_disconnect=DETACH)
    world.leave(detached)
    world.perform(world.ledger.keep_nothing(world.now))
    assert kept.entry.caller is CallerPhase.GONE
    assert detached.entry.caller is CallerPhase.DETACHED
    complete(world)
    assert detached.entry.caller is CallerPhase.GONE


def test_stopping_leaves_what_is_detached_to_another_tokenizer(world: World) -> None:
    detached = running(world, on_disconnect=DETACH)
    world.leave(detached)
    world.perform(world.ledger.leave_all(world.now))
    assert detached.entry.caller is CallerPhase.GONE
    assert not world.releases
    assert world.running()


@pytest.mark.parametrize(("max_count", "max_bytes"), [(1, 1 << 30), (9, 2000)])
def test_what_can_not_be_kept_is_refused_and_takes_nothing_from_what_is(max_count: int, max_bytes: int) -> None:
    retention = Retention(detach_ttl_s=1.0, max_count=max_count, max_bytes=max_bytes)
    request = ValidRequest(request_id="", prompt=IdsPrompt((1,)), retain_ms=5)
    world = World()
    caller = world.open("a", retain_ms=5)
    assert caller is not None
    retention.check(request, 20)
    retention.reserve(caller.entry)
    with pytest.raises(Overloaded) as caught:
        retention.check(request, 40)
    assert caught.value.reason == "RETENTION_FULL"
    retention.check(ValidRequest(request_id="", prompt=IdsPrompt((1,))), 40)
    retention.free(caller.entry)
    retention.check(request, 20)


def test_a_long_prompt_takes_room_among_what_is_kept() -> None:
    world = World()
    world.retention._max_bytes = 100_000
    assert world.open("short", retain_ms=5) is not None
    assert world.open("long", retain_ms=5, prompt_tokens=2000) is None
    long = world.open("unkept", prompt_tokens=2000)
    assert long is not None
    world.retention._max_bytes = 200_000
    before = world.retention.reserved_bytes
    assert world.open("long", retain_ms=5, prompt_tokens=2000) is not None
    assert world.retention.reserved_bytes - before >= 2000 * PROMPT_TOKEN_BYTES
