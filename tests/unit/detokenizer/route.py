"""One sequence through the real core, joined and checked on the way as a receiver would."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from services.detokenizer.batch import SequenceEnd, SequenceStart, TextBatch, TextFinish
from services.detokenizer.core import Core
from services.detokenizer.plan import TextPlan
from services.detokenizer.sequence import Logprobs
from services.protocol.events import TokenInfo
from services.text.vocabulary import Vocabulary
from tests.unit.detokenizer.oracle import End, Told


class Received:
    """What one receiver has of one sequence; rows must join on exactly, and nothing may follow a finish."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.text = ""
        self.deltas: list[str] = []
        self.tokens: list[TokenInfo] = []
        self.finish: TextFinish | None = None

    def take(self, number: int, batch: TextBatch) -> None:
        first = 0
        for row, (sequence, count) in enumerate(zip(batch.sequences, batch.token_counts, strict=True)):
            ids, first = batch.token_ids[first : first + count], first + count
            if sequence == number:
                assert self.finish is None, "output after the finish"
                assert batch.token_offsets[row] == len(self.ids)
                assert batch.text_offsets[row] == len(self.text)
                assert ids or batch.texts[row], "an empty row"
                self.ids += ids
                self.text += batch.texts[row]
                self.deltas += filter(None, [batch.texts[row]])
                self.tokens += batch.row_tokens.get(row, ())
        for finish in batch.finishes:
            if finish.sequence == number:
                assert self.finish is None, "a second finish"
                self.finish = finish
                assert (finish.token_offset, finish.text_offset) == (len(self.ids), len(self.text))

    @property
    def told(self) -> Told:
        return Told(list(self.ids), self.text, (self.finish.reason, self.finish.stop) if self.finish else None)


class Route:
    """A core with one sequence, number 7."""

    NUMBER = 7

    def __init__(self, vocabulary: Vocabulary, plan: TextPlan) -> None:
        self.core = Core(vocabulary)
        self.sent = 0
        self.received = Received()
        self.core.start(SequenceStart(sequence=self.NUMBER, attempt_id=1, choice=0, plan=plan))
        self.collect()

    def give(self, ids: Sequence[int], logprobs: Sequence[Logprobs] | None = None) -> None:
        """Tokens in one delta of the engine."""
        if len(ids) == 1 and logprobs is None:
            self.core.column([self.NUMBER], [self.sent], ids)
        else:
            self.core.tokens(self.NUMBER, self.sent, ids, logprobs)
        self.sent += len(ids)
        self.collect()

    def end(self, end: End) -> None:
        """The engine's end."""
        self.core.end(SequenceEnd(sequence=self.NUMBER, token_offset=self.sent, reason=end.reason, stop=end.stop))
        self.collect()

    def collect(self) -> None:
        batch = self.core.take()
        if batch is not None:
            self.received.take(self.NUMBER, batch)


def run(vocabulary: Vocabulary, plan: TextPlan, deltas: Iterable[Sequence[int]], end: End | None = None) -> Received:
    """A whole sequence in given deltas."""
    route = Route(vocabulary, plan)
    for delta in deltas:
        route.give(delta)
    if end is not None:
        route.end(end)
    return route.received


def split(ids: Sequence[int], cuts: Iterable[int]) -> list[Sequence[int]]:
    """The ids cut at these places."""
    places = sorted({0, len(ids), *(cut for cut in cuts if 0 < cut < len(ids))})
    return [ids[start:stop] for start, stop in pairwise(places)]
