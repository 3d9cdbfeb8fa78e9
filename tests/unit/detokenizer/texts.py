"""Random sequences, plans and stops, made so that stops are met, nearly met, and met across everything."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import settings
from hypothesis import strategies as st

from services.detokenizer.plan import TextPlan
from services.protocol.events import EndOfText, FinishReason, StopMatch, StopToken
from services.text.vocabulary import Vocabulary
from tests.unit.detokenizer.oracle import End, text_of

PHRASES = ("the quick brown fox", "five five", "é世🙂ก\u0301", " \n\n ", "<|im_end|>", "a\ufffdb", "aaaaab")
SHOW_ALL = TextPlan(skip_special_tokens=False)


@dataclass(frozen=True)
class Case:
    """A sequence, its plan, where it is cut into deltas, and the engine's end."""

    vocabulary: Vocabulary
    plan: TextPlan
    ids: list[int]
    cuts: list[int]
    end: End


def examples(quick: int, *, nightly: int = 0) -> int:
    """How many examples of a law to try: so many in the quick form, and in the nightly one fifty times as many."""
    is_nightly = settings.get_current_profile_name() == "nightly"
    return (nightly or 50 * quick) if is_nightly else quick


def cases(vocabulary: Vocabulary, *, longest: int = 24) -> st.SearchStrategy[Case]:
    """Cases over a vocabulary; its ids come from a small choice each time, so that they repeat."""
    return _cases(vocabulary, _ids(vocabulary), longest)


@st.composite
def _cases(draw: st.DrawFn, vocabulary: Vocabulary, ids: st.SearchStrategy[int], longest: int) -> Case:
    palette = draw(st.lists(ids, min_size=1, max_size=8))
    sequence = draw(st.lists(st.sampled_from(palette), max_size=longest))
    plan = TextPlan(
        stop=draw(_stops(vocabulary, sequence)),
        include_stop_in_output=draw(st.booleans()),
        min_tokens=draw(st.integers(0, 6)),
        skip_special_tokens=draw(st.booleans()),
        spaces_between_special_tokens=draw(st.booleans()),
        begins_text=draw(st.booleans()),
        end_token_ids=draw(st.frozensets(st.sampled_from(palette), max_size=2)),
    )
    cuts = draw(st.lists(st.integers(0, longest), max_size=8))
    return Case(vocabulary, plan, sequence, cuts, draw(_ends(sequence, plan)))


def _ids(vocabulary: Vocabulary) -> st.SearchStrategy[int]:
    """Valid ids of every kind about as often as each other, and now and then one that doesn't exist."""
    count, pieces = len(vocabulary.pieces), vocabulary.pieces
    wanted = {
        phrase[start:end].encode()
        for phrase in PHRASES
        for start in range(len(phrase))
        for end in range(start + 1, len(phrase) + 1)
    }
    kinds = (
        [token_id for token_id, piece in enumerate(pieces) if len(piece) == 1],
        [token_id for token_id, piece in enumerate(pieces) if piece in wanted],
        [token_id for token_id, piece in enumerate(pieces) if piece and token_id not in vocabulary.plain],
        sorted(vocabulary.added | vocabulary.special),
    )
    invalid = st.sampled_from((-1, count, count + 1, 2**32, 2**63))
    valid = st.one_of(*(st.sampled_from(kind) for kind in kinds if kind), st.integers(0, count - 1))
    return st.integers(0, 99).flatmap(lambda chance: invalid if chance == 99 else valid)


@st.composite
def _stops(draw: st.DrawFn, vocabulary: Vocabulary, ids: list[int]) -> tuple[str, ...]:
    known = [token_id for token_id in ids if 0 <= token_id < len(vocabulary.pieces)]
    text = text_of(vocabulary, SHOW_ALL, known).full
    stops = []
    for _ in range(draw(st.integers(0, 3))):
        start = draw(st.integers(0, len(text)))
        stop = text[start : start + draw(st.integers(1, 12))] + draw(st.sampled_from(("", "", "", "x", " ")))
        stops.append(stop or draw(st.sampled_from(("a", "\ufffd", "aab", "<|im_end|>"))))
    return tuple(stops)


def _ends(ids: list[int], plan: TextPlan) -> st.SearchStrategy[End]:
    stops: list[StopMatch] = []
    if ids and ids[-1] in plan.end_token_ids and len(ids) >= plan.min_tokens:
        stops = [StopToken(ids[-1]), EndOfText(ids[-1])]
    others = [End(reason) for reason in FinishReason if reason is not FinishReason.STOP]
    return st.sampled_from([*(End(FinishReason.STOP, stop) for stop in stops), *others])
