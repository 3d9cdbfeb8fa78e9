"""An answer under faults against the same answer without: equal, or different from a near-tie on, or wrong."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile

from tailrace.client import TokenInfo
from tests.chaos.callers import Answer

NEAR_TIE = 1e-4
"""Two best logprobs this near to each other may change places when a prompt is computed in other pieces."""


@dataclass(frozen=True)
class Expected:
    """The undisturbed answer; `tokens` is empty where every difference is a fault (the fake engine)."""

    text: str
    token_ids: Sequence[int]
    tokens: Sequence[TokenInfo] = ()


@dataclass(frozen=True)
class Verdict:
    """What became of all answers. The numbers in `wrong` are of answers that differ without a near-tie."""

    identical: int
    near_ties: int
    drawn_otherwise: int
    wrong: tuple[int, ...]


def judge(answers: Iterable[Answer], expected: Mapping[int, Expected]) -> Verdict:
    """Compares every whole answer. Seeded ones may, with a real model, be drawn otherwise after the same rounding."""
    identical, near_ties, drawn, wrong = 0, 0, 0, []
    for answer in answers:
        if not answer.whole:
            continue
        reference = expected[answer.question.number]
        if answer.text == reference.text and answer.token_ids in ([], list(reference.token_ids)):
            identical += 1
        elif reference.tokens and not answer.question.greedy:
            drawn += 1
        elif reference.tokens and _near_tie(reference.tokens, _common_tokens(answer, reference)):
            near_ties += 1
        else:
            wrong.append(answer.question.number)
    return Verdict(identical, near_ties, drawn, tuple(wrong))


def _common_tokens(answer: Answer, reference: Expected) -> int:
    """How many tokens both begin with. Over HTTP only text is known: its tokens that are whole in the common text."""
    if answer.token_ids:
        return _common(answer.token_ids, reference.token_ids)
    common_bytes = len(reference.text[: _common(answer.text, reference.text)].encode())
    length, count = 0, 0
    for token in reference.tokens:
        length += len(token.bytes)
        if length > common_bytes:
            break
        count += 1
    return count


def _common(one: Sequence[object], other: Sequence[object]) -> int:
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


def _near_tie(tokens: Sequence[TokenInfo], position: int) -> bool:
    if position >= len(tokens) or len(tokens[position].top) < 2:
        return False
    best, second = tokens[position].top[:2]
    return best.logprob - second.logprob < NEAR_TIE
