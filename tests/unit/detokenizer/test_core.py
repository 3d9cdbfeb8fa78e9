"""What the core refuses, ignores and forgets."""

from __future__ import annotations

import pytest

from services.detokenizer.batch import SequenceEnd, SequenceStart
from services.detokenizer.core import Core
from services.detokenizer.plan import TextPlan
from services.detokenizer.sequence import Logprobs
from services.detokenizer.state import ProtocolError
from services.protocol.events import FinishReason, StopText
from tests.unit.detokenizer.small_tokenizers import byte_ids, byte_level, vocabulary_of

A, B, C = byte_ids(byte_level(), b"abc")


def started(*numbers: int, plan: TextPlan | None = None) -> Core:
    core = Core(vocabulary_of(byte_level()))
    for number in numbers:
        core.start(SequenceStart(sequence=number, attempt_id=number, choice=0, plan=plan or TextPlan()))
    core.take()
    return core


def the_end(token_offset: int, number: int = 1) -> SequenceEnd:
    return SequenceEnd(sequence=number, token_offset=token_offset, reason=FinishReason.LENGTH)


@pytest.mark.parametrize(
    ("number", "token_offset"), [(1, 1), (1, 2**31), (2, 0)], ids=["a gap", "a wild offset", "an unknown sequence"]
)
def test_a_row_that_does_not_fit_is_a_protocol_error(number: int, token_offset: int) -> None:
    with pytest.raises(ProtocolError):
        started(1).column([number], [token_offset], [A])
    with pytest.raises(ProtocolError):
        started(1).tokens(number, token_offset, [A, B])


def test_a_row_told_twice_is_a_protocol_error() -> None:
    core = started(1)
    core.column([1], [0], [A])
    with pytest.raises(ProtocolError):
        core.column([1], [0], [A])


def test_an_end_with_tokens_missing_is_a_protocol_error() -> None:
    with pytest.raises(ProtocolError):
        started(1).end(the_end(1))


def test_an_end_told_twice_and_tokens_after_it_are_protocol_errors() -> None:
    core = started(1)
    core.end(the_end(0))
    with pytest.raises(ProtocolError):
        core.end(the_end(0))
    with pytest.raises(ProtocolError):
        core.column([1], [0], [A])


def test_a_sequence_that_begins_twice_is_a_protocol_error() -> None:
    core = started(1)
    with pytest.raises(ProtocolError):
        core.start(SequenceStart(sequence=1, attempt_id=2, choice=0, plan=TextPlan()))


def test_logprobs_that_do_not_match_the_ids_are_a_protocol_error() -> None:
    with pytest.raises(ProtocolError):
        started(1, plan=TextPlan(token_info=True)).tokens(1, 0, [A, B], [Logprobs(-1.0)])


def test_after_its_finish_a_sequence_ignores_tokens_and_passes_its_end_on() -> None:
    core = started(1, plan=TextPlan(stop=("b",)))
    core.tokens(1, 0, [A, B])
    core.column([1], [2], [C])
    core.tokens(1, 3, [C, A])
    core.end(the_end(5))
    batch = core.take()
    assert batch is not None
    assert (batch.texts, batch.token_ids) == (["a"], [A, B])
    assert [finish.stop for finish in batch.finishes] == [StopText("b")]
    assert batch.engine_ends == [the_end(5)]


def test_a_released_attempt_is_forgotten_with_all_its_sequences_and_no_other() -> None:
    core = Core(vocabulary_of(byte_level()))
    for number, attempt_id in ((1, 7), (2, 7), (3, 8)):
        core.start(SequenceStart(sequence=number, attempt_id=attempt_id, choice=number, plan=TextPlan()))
    core.released(7)
    assert (core.known_sequences, core.open_sequences) == (1, 1)
    core.column([3], [0], [A])
    with pytest.raises(ProtocolError):
        core.column([1], [0], [A])
    batch = core.take()
    assert batch is not None
    assert batch.released_attempt_ids == [7]


def test_the_release_of_an_attempt_that_never_began_here_is_passed_on() -> None:
    core = started()
    core.released(5)
    batch = core.take()
    assert batch is not None
    assert batch.released_attempt_ids == [5]


def test_there_is_nothing_to_take_when_nothing_is_new() -> None:
    core = started(1)
    assert core.take() is None
    core.column([1], [0], [A])
    assert core.take() is not None
    assert core.take() is None


def test_token_info_keeps_the_bytes_that_a_token_gave_to_the_text() -> None:
    """A hidden token gave none, a stripped space none; an alternative has its own bytes."""
    (special,) = (byte_level().get_vocab()["<|im_end|>"],)
    core = started(1, plan=TextPlan(token_info=True))
    core.tokens(1, 0, [A, special], [Logprobs(-1.0, [special], [-1.0]), Logprobs(-2.0)])
    batch = core.take()
    assert batch is not None
    first, second = batch.row_tokens[0]
    assert (first.bytes, first.top[0].bytes) == (b"a", b"<|im_end|>")
    assert (second.token_id, second.bytes, second.logprob) == (special, b"", -2.0)
