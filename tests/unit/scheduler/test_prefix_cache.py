"""The tree of cached blocks, by itself and as sequences use it."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.protocol.events import FinishReason
from services.scheduler.admission import Limits
from services.scheduler.engine.api import SequenceKey
from services.scheduler.kv.pool import BlockPool
from services.scheduler.kv.prefix_cache import Node, PrefixCache
from services.scheduler.policy import Policy
from services.scheduler.submission import ChoiceStart
from tests.unit.scheduler.driver import Driver, alone

SIZE = 4


class User:
    """A sequence as the cache sees it: it finds, holds, computes the rest and shares it."""

    def __init__(self, cache: PrefixCache, ids: Sequence[int], *, key: int = 1, salt: str = "") -> None:
        self.cache = cache
        self.path: list[Node] = cache.find(salt, ids, len(ids) // SIZE)
        self.found = len(self.path)
        cache.hold(self.path)
        self.blocks = [node.block for node in self.path] + cache.take(len(ids) // SIZE - self.found)
        for number in range(self.found, len(self.blocks)):
            part = ids[number * SIZE : (number + 1) * SIZE]
            self.blocks[number] = cache.share(self.path, salt, part, self.blocks[number], SequenceKey(key))

    def leave(self) -> None:
        self.cache.let_go(self.path, [])
        self.blocks.clear()

    @property
    def table(self) -> tuple[list[Node], list[int]]:
        return self.path, self.blocks


def cache_of(blocks: int = 8) -> PrefixCache:
    return PrefixCache(BlockPool(blocks), SIZE)


def test_who_begins_with_the_same_ids_begins_with_the_same_blocks() -> None:
    cache = cache_of()
    first = User(cache, range(12))
    second = User(cache, [*range(8), 90, 91, 92, 93])
    assert (first.found, second.found) == (0, 2)
    assert first.blocks[:2] == second.blocks[:2]
    assert cache.pool.free == 8 - 4
    cache.check_integrity([first.table, second.table])


def test_a_block_is_known_by_all_that_stands_before_it_and_not_by_its_own_ids() -> None:
    cache = cache_of()
    User(cache, [*range(4), *range(50, 54)])
    assert User(cache, [*range(10, 14), *range(50, 54)]).found == 0


def test_prefixes_of_different_salts_never_meet() -> None:
    cache = cache_of()
    User(cache, range(8), salt="a")
    assert User(cache, range(8), salt="b").found == 0


def test_what_nobody_holds_is_kept_until_its_block_is_needed() -> None:
    cache = cache_of(4)
    User(cache, range(8)).leave()
    assert (cache.pool.free, cache.cached, cache.available) == (2, 2, 4)
    again = User(cache, range(8))
    assert again.found == 2
    assert cache.cached == 0
    again.leave()
    cache.take(4)
    assert cache.find("", range(8), 2) == []


def test_the_longest_unused_goes_first_and_a_leaf_before_its_parent() -> None:
    cache = cache_of(4)
    User(cache, range(8)).leave()
    User(cache, range(20, 28)).leave()
    User(cache, range(4)).leave()
    cache.take(1)
    assert len(cache.find("", range(8), 2)) == 1
    cache.take(2)
    assert cache.find("", range(20, 28), 2) == []
    assert len(cache.find("", range(4), 1)) == 1


def test_two_who_computed_the_same_share_one_block_afterwards() -> None:
    cache = cache_of(4)
    first, second = cache.take(1), cache.take(1)
    one: list[Node] = []
    other: list[Node] = []
    assert cache.share(one, "", range(4), first[0], SequenceKey(1)) == first[0]
    assert cache.share(other, "", range(4), second[0], SequenceKey(2)) == first[0]
    assert cache.pool.free == 3
    cache.check_integrity([(one, first), (other, first)])


def test_a_flush_hides_everything_frees_what_is_idle_and_leaves_what_is_held() -> None:
    cache = cache_of()
    held = User(cache, range(8))
    User(cache, range(50, 58)).leave()
    assert cache.flush() == 2
    assert (cache.cached, cache.pool.free) == (0, 6)
    assert cache.find("", range(8), 2) == []
    assert not cache.may_extend(held.path)
    cache.check_integrity([held.table])
    held.leave()
    assert cache.pool.free == 8


def test_what_a_failed_sequence_computed_is_hidden_with_all_that_others_built_on_it() -> None:
    cache = cache_of()
    User(cache, range(4), key=1).leave()
    bad = User(cache, range(8), key=2)
    built_on_it = User(cache, range(12), key=3)
    cache.forget_of(SequenceKey(2), bad.path)
    assert len(cache.find("", range(12), 3)) == 1
    cache.check_integrity([bad.table, built_on_it.table])
    bad.leave()
    built_on_it.leave()
    assert (cache.cached, cache.pool.free) == (1, 7)


@pytest.mark.parametrize("broken", ["holders", "idle"])
def test_the_integrity_check_notices(broken: str) -> None:
    cache = cache_of()
    user = User(cache, range(8))
    cache.check_integrity([user.table])
    with pytest.raises(AssertionError):
        cache.check_integrity([user.table, user.table] if broken == "holders" else [])


@given(
    st.integers(4, 24),
    st.lists(st.tuples(st.sampled_from("abcdefl"), st.integers(0, 3), st.integers(1, 4)), max_size=60),
)
def test_free_cached_and_held_always_make_the_whole(total: int, moves: list[tuple[str, int, int]]) -> None:
    cache, users = cache_of(total), list[User]()
    for move, stem, length in moves:
        ids = [stem // 2, 0, 0, stem] * length
        if move in "abc" and length <= cache.available:
            users.append(User(cache, ids, key=len(users), salt=move))
        elif move == "f":
            cache.flush()
        elif move == "e" and users:
            user = users.pop(stem % len(users))
            cache.forget_of(SequenceKey(stem), user.path)
            user.leave()
        elif users:
            users.pop(stem % len(users)).leave()
        cache.check_integrity([user.table for user in users])


PROMPT = tuple(range(20, 20 + 4 * SIZE))


def test_a_second_request_computes_only_what_the_first_did_not() -> None:
    driver = Driver(block_size=SIZE)
    driver.submit(1, PROMPT)
    driver.run()
    driver.submit(2, (*PROMPT, 99))
    assert driver.step().tokens == 1
    driver.run()
    assert driver.cached(2) == len(PROMPT)
    assert driver.ids(2) == alone(2, (*PROMPT, 99))


def test_the_last_id_is_computed_even_where_all_is_cached() -> None:
    driver = Driver(block_size=SIZE)
    driver.submit(1, PROMPT)
    driver.run()
    driver.submit(2, PROMPT)
    driver.run()
    assert driver.cached(2) == len(PROMPT) - SIZE
    assert driver.ids(2) == alone(2, PROMPT)


def test_a_conversation_s_next_turn_finds_the_answer_too() -> None:
    driver = Driver(block_size=SIZE)
    driver.submit(1, PROMPT, max_tokens=2 * SIZE + 1)
    driver.run()
    driver.submit(2, (*PROMPT, *driver.ids(1), 30, 31))
    driver.run()
    assert driver.cached(2) == len(PROMPT) + 2 * SIZE


def test_choices_of_one_request_share_their_prompt_and_it_is_computed_once() -> None:
    driver = Driver(block_size=SIZE)
    prompt = (*PROMPT, 99)
    driver.submit(1, prompt, choices=tuple(ChoiceStart(number) for number in range(4)))
    driver.run()
    assert driver.fake.computed_tokens == len(prompt) + 3 + 4 * 7
    assert [driver.cached(1, choice) for choice in range(4)] == [0, *[len(PROMPT)] * 3]


def test_waiting_for_a_sibling_holds_nobody_else_up() -> None:
    driver = Driver(block_size=SIZE, limits=Limits(max_running=4, max_step_tokens=SIZE))
    driver.submit(1, PROMPT, choices=(ChoiceStart(0), ChoiceStart(1)))
    driver.submit(2, (90, 91))
    driver.step()
    driver.abort(1)
    driver.submit(3, PROMPT)
    driver.run()
    assert driver.end(3).reason is FinishReason.LENGTH


def test_a_preempted_sequence_finds_what_is_left_of_its_own_blocks() -> None:
    driver = Driver(block_size=SIZE, total_blocks=10)
    driver.submit(1, range(20, 28), max_tokens=20)
    driver.submit(2, range(30, 38), max_tokens=20)
    while not driver.sequence(2).preemptions:
        driver.step()
    driver.run()
    resumed = len(driver.ids(2)) + 8
    assert driver.fake.computed_tokens < 2 * (8 + 19) + resumed
    assert driver.ids(2) == alone(2, range(30, 38), max_tokens=20)
    assert driver.cached(2) == 0


def test_a_continuation_finds_prompt_and_output_and_counts_the_prompt_alone() -> None:
    driver = Driver(block_size=SIZE)
    driver.submit(1, PROMPT, max_tokens=20)
    driver.run()
    so_far = tuple(driver.ids(1)[: 2 * SIZE + 1])
    computed = driver.fake.computed_tokens
    driver.submit(2, PROMPT, choices=(ChoiceStart(0, so_far),), max_tokens=len(so_far) + 1)
    driver.run()
    assert driver.fake.computed_tokens == computed + 1
    assert driver.cached(2) == len(PROMPT)


def test_without_the_cache_nothing_is_shared_and_nothing_kept() -> None:
    driver = Driver(block_size=SIZE, limits=Limits(prefix_cache=False))
    for attempt_id in (1, 2):
        driver.submit(attempt_id, PROMPT)
        driver.run()
    assert driver.cached(2) == 0
    assert driver.free == driver.total


def test_a_bad_request_leaves_nothing_that_a_later_one_could_find() -> None:
    driver = Driver(block_size=SIZE, bad_output_id=99, limits=Limits(max_running=2, max_step_tokens=SIZE))
    driver.submit(1, PROMPT)
    driver.run()
    driver.submit(2, (*PROMPT, 99, 1, 2, 3, 4))
    driver.run()
    assert driver.end(2).reason is FinishReason.ERROR
    driver.submit(3, (*PROMPT, 99, 1, 2, 3, 4))
    driver.run()
    assert driver.cached(3) == len(PROMPT)


def test_longest_prefix_goes_first_but_not_before_who_waits_too_long() -> None:
    driver = Driver(block_size=SIZE, limits=Limits(max_running=1, policy=Policy(name="longest-prefix")))
    driver.submit(1, PROMPT, max_tokens=30)
    driver.step()
    driver.submit(2, (1, 2, 3))
    driver.now += len(PROMPT) * 0.01 / 2
    driver.submit(3, (*PROMPT, 90))
    driver.now += len(PROMPT) * 0.01
    driver.submit(4, (*PROMPT, 91))
    assert _order(driver) == [3, 2, 4]


def test_priority_goes_first_but_not_before_who_waits_too_long() -> None:
    driver = Driver(limits=Limits(max_running=1, policy=Policy(name="priority", priority_step_s=10)))
    driver.submit(1, max_tokens=30)
    driver.step()
    driver.submit(2)
    driver.submit(3, priority=-1)
    driver.now += 15
    driver.submit(4, priority=1)
    driver.submit(5, priority=2)
    assert _order(driver) == [5, 2, 4, 3]


def _order(driver: Driver) -> list[int]:
    admitted: list[int] = []
    while driver.core.has_work:
        admitted += [sequence.log.attempt_id for sequence in driver.step().admitted]
    return admitted
