"""The decoder and the stop matcher as a fuzz target: bytes become a sequence, its plan and its deltas."""

from __future__ import annotations

from collections.abc import Hashable, Iterator

from services.detokenizer.plan import TextPlan
from services.detokenizer.sequence import Sequence
from services.detokenizer.stopper import Match, Stopper
from services.protocol.events import EndOfText, FinishReason, StopMatch
from services.text.vocabulary import Vocabulary
from tests.unit.detokenizer.oracle import End, first_stop, told
from tests.unit.detokenizer.route import Route
from tests.unit.detokenizer.small_tokenizers import WORDS, byte_level, sentence_piece, vocabulary_of

VOCABULARIES = (vocabulary_of(byte_level()), vocabulary_of(sentence_piece()))
BAD_IDS = (-1, 2**32, 2**63)
FRAGMENTS = ("a", "b", "\n", " ", "x", "\ufffd", "<|im_end|>", "é", "世", "🙂", "\u0301", *WORDS)
MAX_IDS = 24


class Bytes:
    """Reads choices from an input; one that is used up gives zeros, so every input means something."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._place = 0

    def below(self, count: int) -> int:
        """A number below `count` (at most 65,536)."""
        value = 0
        for _ in range(1 if count <= 256 else 2):
            value = value << 8 | (self._data[self._place] if self._place < len(self._data) else 0)
            self._place += 1
        return value % count

    @property
    def left(self) -> int:
        """Bytes that aren't read yet."""
        return max(0, len(self._data) - self._place)


def text(data: bytes) -> Iterator[Hashable]:
    """After every delta what has left is what the definition says, and the stop matcher agrees with a plain search."""
    source = Bytes(data)
    vocabulary = VOCABULARIES[source.below(2)]
    palette = [_token_id(source, vocabulary) for _ in range(1 + source.below(8))]
    plan = _plan(source, palette)
    route, ids = Route(vocabulary, plan), list[int]()
    sequence = next(sequences[0] for _, sequences in route.core.attempts())
    while source.left and len(ids) < MAX_IDS:
        delta = [palette[source.below(len(palette))] for _ in range(1 + source.below(3) ** 2)]
        ids += delta
        route.give(delta)
        assert route.received.told == told(vocabulary, plan, ids)
        yield from _states(sequence)
    end = _end(source, ids, plan)
    route.end(end)
    assert route.received.told == told(vocabulary, plan, ids, end)
    yield from _states(sequence)
    yield from _stopper(source, plan.stop)


def _token_id(source: Bytes, vocabulary: Vocabulary) -> int:
    match source.below(16):
        case 0:
            return BAD_IDS[source.below(len(BAD_IDS))]
        case 1 | 2 | 3:
            odd = sorted(vocabulary.added | vocabulary.special)
            return odd[source.below(len(odd))]
        case _:
            return source.below(len(vocabulary.pieces))


def _plan(source: Bytes, palette: list[int]) -> TextPlan:
    flags = source.below(32)
    stops = [
        "".join(FRAGMENTS[source.below(len(FRAGMENTS))] for _ in range(1 + source.below(4))) for _ in range(flags % 4)
    ]
    return TextPlan(
        stop=tuple(stops),
        include_stop_in_output=bool(source.below(2)),
        min_tokens=source.below(4),
        skip_special_tokens=bool(source.below(2)),
        spaces_between_special_tokens=bool(source.below(2)),
        begins_text=bool(source.below(2)),
        end_token_ids=frozenset(palette[: source.below(3)]),
    )


def _end(source: Bytes, ids: list[int], plan: TextPlan) -> End:
    may_be_the_end = ids and ids[-1] in plan.end_token_ids and len(ids) >= plan.min_tokens
    if may_be_the_end and source.below(2):
        stop: StopMatch = EndOfText(ids[-1])
        return End(FinishReason.STOP, stop)
    return End(FinishReason.LENGTH)


def _states(sequence: Sequence) -> Iterator[Hashable]:
    """Where a sequence stands, coarsely: two inputs that differ in none of these teach the same."""
    decoder, stopper = sequence._decoder, sequence._stopper
    yield (
        sequence.phase,
        sequence.quick,
        len(decoder.incomplete),
        bool(decoder.hidden),
        sequence._candidate is not None,
        min(len(sequence._waiting), 4),
        min(stopper.held, 6),
        min(stopper._node._depth, 6),
        min(len(stopper._gaps), 2),
    )


def _stopper(source: Bytes, stops: tuple[str, ...]) -> Iterator[Hashable]:
    """The matcher on its own, with as much text as is left: fragments of the stops, so that they nearly match."""
    stopper, text = Stopper(stops), ""
    letters = "".join(stops) or "a"
    for _ in range(12):
        start = source.below(len(letters))
        more = letters[start : start + source.below(5)]
        before, text = text, text + more
        match, expected = stopper.push(more), first_stop(stops, before, text)
        if expected is not None:
            start, stop = expected
            assert match == Match(stop, len(text) - start, len(text) - start - len(stop))
            return
        assert match is None
        prefixes = (stop[:length] for stop in stops for length in range(1, len(stop)))
        assert stopper.held == max((len(prefix) for prefix in prefixes if text.endswith(prefix)), default=0)
        yield ("stopper", len(stops), min(stopper.held, 8), min(stopper._node._depth, 8))
