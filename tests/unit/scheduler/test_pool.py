import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.scheduler.kv.pool import BlockPool


def test_blocks_are_given_out_once_until_they_come_back() -> None:
    pool = BlockPool(4)
    taken = pool.take(4)
    assert sorted(taken) == [0, 1, 2, 3]
    assert pool.free == 0
    pool.give_back(taken[:2])
    assert sorted(pool.take(2)) == sorted(taken[:2])


def test_more_blocks_than_are_free_are_not_given() -> None:
    with pytest.raises(AssertionError):
        BlockPool(2).take(3)


def test_a_block_given_back_twice_is_noticed() -> None:
    pool = BlockPool(2)
    block = pool.take(1)
    pool.give_back(block)
    with pytest.raises(AssertionError):
        pool.give_back(block)


@pytest.mark.parametrize(
    "tables",
    [[], [[0, 1, 2]], [[0], [0, 1]], [[0, 3]]],
    ids=["lost", "too many", "held twice", "free but held"],
)
def test_integrity_check_notices(tables: list[list[int]]) -> None:
    pool = BlockPool(4)
    assert sorted(pool.take(2)) == [0, 1]
    pool.check_integrity([[0], [1]])
    with pytest.raises(AssertionError):
        pool.check_integrity(tables)


@given(st.integers(1, 40), st.lists(st.tuples(st.booleans(), st.integers(0, 12)), max_size=60))
def test_free_and_held_always_make_the_whole(total: int, moves: list[tuple[bool, int]]) -> None:
    pool, tables = BlockPool(total), []
    for takes, count in moves:
        if takes and count <= pool.free:
            tables.append(pool.take(count))
        elif not takes and tables:
            pool.give_back(tables.pop(count % len(tables)))
        pool.check_integrity(tables)
