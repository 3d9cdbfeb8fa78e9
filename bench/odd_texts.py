"""Outputs that have cost other servers quadratic time or memory, and what a token of them costs at two sizes."""

from __future__ import annotations

import gc
import time
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from services.detokenizer.batch import SequenceStart
from services.detokenizer.core import Core
from services.detokenizer.plan import TextPlan
from services.text.vocabulary import Vocabulary

# `min_tokens` lets stops be looked for without ever ending the stream.
NEVER = 1 << 30
NO_STOPS = TextPlan()


@dataclass(frozen=True)
class OddText:
    """One output: `ids`, again and again, until there are `tokens` of them."""

    name: str
    ids: Sequence[int]
    tokens: int
    plan: TextPlan = NO_STOPS


def odd_texts(vocabulary: Vocabulary, encode: Callable[[str], Sequence[int]]) -> list[OddText]:
    """The cases over one tokenizer; `encode` turns a text into its ids."""
    byte = next(token_id for token_id, piece in enumerate(vocabulary.pieces) if piece == b"\xe4")
    special = min(vocabulary.special)
    (a,), (b,) = ([token_id for token_id, text in vocabulary.plain.items() if text == letter][:1] for letter in "ab")
    many = TextPlan(stop=tuple("a" * length + "b" for length in range(1, 1024, 16)), min_tokens=NEVER)
    marks = TextPlan(stop=("\u0301" * 64 + "x",), min_tokens=NEVER)
    hidden = TextPlan(stop=(vocabulary.pieces[special].decode() + "x",), min_tokens=NEVER)
    literal = encode("a literal <0xEA> and <|im_end|>, <0xE4><|im_start|> and </s> ")
    return [
        OddText("one byte that forms no character", [byte], 10_000),
        OddText("a", [a], 100_000),
        OddText("a, under 64 stops of a…ab", [a], 100_000, many),
        OddText("a…ab, under the same stops", [*[a] * 1000, b], 100_000, many),
        OddText("combining marks", encode("\u0301"), 5_000),
        OddText("combining marks, under a stop of 64 of them", encode("\u0301"), 5_000, marks),
        OddText("literal <0xEA> and <|im_end|>", literal, 10_000),
        OddText("hidden special tokens that begin a stop", [special], 10_000, hidden),
    ]


def cpu_us(vocabulary: Vocabulary, odd: OddText, tokens: int) -> float:
    """CPU microseconds a token, one token at a time."""
    core = _started(vocabulary, odd.plan)
    gc.collect()
    start = time.process_time()
    _feed(core, odd.ids, tokens)
    return (time.process_time() - start) / tokens * 1e6


def peak_bytes(vocabulary: Vocabulary, odd: OddText, tokens: int) -> int:
    """The most memory that was in use beyond what there was before, while what is sent is dropped."""
    core = _started(vocabulary, odd.plan)
    gc.collect()
    tracemalloc.start()
    try:
        _feed(core, odd.ids, tokens)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def _started(vocabulary: Vocabulary, plan: TextPlan) -> Core:
    core = Core(vocabulary)
    core.start(SequenceStart(sequence=0, attempt_id=0, choice=0, plan=plan))
    core.take()
    return core


def _feed(core: Core, ids: Sequence[int], tokens: int) -> None:
    for step in range(tokens):
        core.column((0,), (step,), (ids[step % len(ids)],))
        core.take()
