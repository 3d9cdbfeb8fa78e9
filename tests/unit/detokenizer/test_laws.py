"""The promises of the return path's text over small tokenizers of both families, with everything odd in them."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.detokenizer import laws
from tests.unit.detokenizer.small_tokenizers import byte_level, sentence_piece, vocabulary_of
from tests.unit.detokenizer.texts import Case, cases, examples

BYTE_LEVEL = cases(vocabulary_of(byte_level()))
SENTENCE_PIECE = cases(vocabulary_of(sentence_piece()))
EITHER = st.one_of(BYTE_LEVEL, SENTENCE_PIECE)


@settings(max_examples=examples(250))
@given(EITHER)
def test_what_has_left_depends_on_the_tokens_so_far_and_the_plan_alone(case: Case) -> None:
    laws.what_has_left_depends_on_the_tokens_so_far_and_the_plan_alone(case)


@settings(max_examples=examples(120))
@given(EITHER)
def test_the_whole_is_the_same_in_steps_of_one_two_eight_and_at_once(case: Case) -> None:
    laws.the_whole_is_the_same_in_any_steps(case)


@settings(max_examples=examples(100))
@given(EITHER)
def test_text_never_runs_ahead_of_its_ids(case: Case) -> None:
    laws.text_never_runs_ahead_of_its_ids(case)


@settings(max_examples=examples(100))
@given(st.one_of(st.tuples(BYTE_LEVEL, BYTE_LEVEL), st.tuples(SENTENCE_PIECE, SENTENCE_PIECE)))
def test_a_neighbour_changes_nothing(pair: tuple[Case, Case]) -> None:
    laws.a_neighbour_changes_nothing(*pair)
