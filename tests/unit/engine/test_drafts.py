"""Guesses by what followed the same ids before."""

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.engine.api import SequenceKey, Slice
from services.scheduler.engine.drafts import CONTEXT, Drafts

KEY = SequenceKey(1)


def decode(ids: Sequence[int], *, blocks: int = 100, key: SequenceKey = KEY, suppress: bool = False) -> Slice:
    return Slice(key, (ids[-1],), len(ids) - 1, range(blocks), True, 0, suppress)


def drafts_of(ids: Sequence[int], most: int = 7) -> Drafts:
    drafts = Drafts(most, 16)
    drafts.open(KEY, ids, ())
    return drafts


def trusting(ids: Sequence[int], most: int = 7) -> Drafts:
    """As if 40 guesses in a row had been right."""
    drafts = drafts_of((), most)
    for _ in range(40):
        drafts.guess([decode([1] * 50)])
        drafts.learn(KEY, [1])
    drafts.learn(KEY, ids)
    return drafts


def test_what_followed_before_is_guessed_to_follow_again() -> None:
    ids = [5, 1, 2, 3, 8, 9, 10, 11, 1, 2, 3]
    assert trusting(ids).guess([decode(ids)]) == [[8, 9, 10, 11, 1, 2, 3]]
    assert trusting(ids, most=2).guess([decode(ids)]) == [[8, 9]]


def test_of_several_the_latest_is_taken() -> None:
    ids = [1, 2, 3, 8, 1, 2, 3, 9, 1, 2, 3]
    assert trusting(ids, most=1).guess([decode(ids)]) == [[9]]


def test_what_repeats_goes_on_repeating() -> None:
    ids = [7, 4, 5, 6, 4, 5, 6]
    assert trusting(ids).guess([decode(ids)]) == [[4, 5, 6, 4, 5, 6, 4]]


def test_where_nothing_came_before_nothing_is_guessed() -> None:
    for ids in ([1], [1, 2, 3], [1, 2, 9, 1, 2], [256, 65536, 1, 0, 1, 256]):
        assert drafts_of(ids).guess([decode(ids)]) == [()]


@given(st.lists(st.sampled_from([0, 1, 256, 65536, 2**24]), max_size=60))
def test_a_guess_is_what_stands_behind_the_last_place_with_the_same_ids(ids: list[int]) -> None:
    found = next((at for at in range(len(ids) - CONTEXT - 1, -1, -1) if ids[at : at + CONTEXT] == ids[-CONTEXT:]), None)
    [guess] = drafts_of(ids).guess([decode(ids or [0])])
    expected = [] if found is None or len(ids) < CONTEXT else ids[found + CONTEXT : found + CONTEXT + 7]
    assert list(guess) == (expected * 7)[: len(guess)]
    assert bool(guess) == bool(expected)


def test_a_draft_stays_within_its_room() -> None:
    ids = [1, 2, 3] * 9  # 27 of 32 positions, so that the draft may have 31 - 27 - 1
    assert [len(guess) for guess in trusting(ids).guess([decode(ids, blocks=2)])] == [4]
    assert trusting(ids).guess([decode(ids, suppress=True)]) == [()]
    prefill = Slice(KEY, (1, 2), 0, range(9), True, 0, False)
    assert trusting(ids).guess([prefill]) == [()]


def test_who_was_often_wrong_is_trusted_less_and_may_earn_it_again() -> None:
    drafts, ids = drafts_of([1, 2, 3] * 5), [1, 2, 3] * 5

    def goes_on(tokens: Sequence[int]) -> int:
        for token in tokens:
            drafts.guess([decode(ids)])
            drafts.learn(KEY, [token])
            ids.append(token)
        [guess] = drafts.guess([decode(ids)])
        return len(guess)

    assert goes_on([]) == 1  # at a probability of a half
    assert goes_on([1, 2, 3] * 5) > 4
    assert goes_on([token for new in range(100, 130) for token in (new, 1, 2, 3)]) == 0
    assert goes_on([9] * 40) > 4


def test_among_many_a_guess_must_be_surer() -> None:
    ids = [1, 2, 3] * 5
    drafts = drafts_of(ids)
    others = [SequenceKey(number) for number in range(2, 9)]
    for key in others:
        drafts.open(key, [7], ())
    slices = [decode(ids), *(decode([7], key=key) for key in others)]
    assert [len(guess) for guess in drafts.guess(slices)] == [0] * 8
    long = Slice(SequenceKey(2), range(200), 0, range(99), False, 0, False)
    assert [len(guess) for guess in drafts.guess([decode(ids), long])] == [1, 0], "a prefill is none of them"


def test_with_none_wanted_nothing_is_kept() -> None:
    drafts = drafts_of([1, 2, 3, 1, 2, 3], most=0)
    drafts.learn(KEY, [1])
    assert drafts.guess([decode([1, 2, 3, 1])]) == [()]
    assert not drafts._histories
    drafts.close(KEY)
