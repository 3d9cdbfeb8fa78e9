"""Speculation by prompt lookup: what followed the same ids earlier in a sequence is guessed to follow them again.

A step of few sequences mostly waits for the weights, which serve a guessed id as well as a known one: computing both
costs little more than one. A guess is kept where it is what is drawn, so an answer is the same with and without. How
often guesses were right, a sequence is asked at every token, whether or not they were computed.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

from services.scheduler.engine.api import SequenceKey, Slice

CONTEXT = 3
"""Ids that must have stood before in the same order. Two are found sooner and mislead more often, four the reverse."""

PASS_ROWS = 1.5
"""What saving a pass over the weights is worth, in rows that it could have computed.

With int4 weights and AVX2 a pass costs 2.5 rows: a step takes 3.8 ms, and 1.5 for each row. One sequence saves it
whole, several only where all of them get ahead. With wider weights and better processors it costs more.
"""

_TRUST_AT_FIRST, _TRUST_KEPT = 0.5, 0.9
_BYTES = array("i").itemsize


class Drafts:
    """The guesses for the sequences of one engine; at most `most` ids each, 0 for none at all."""

    def __init__(self, most: int, block_size: int) -> None:
        self._most = most
        self._block_size = block_size
        self._histories: dict[SequenceKey, _History] = {}

    def open(self, key: SequenceKey, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> None:
        """Takes up a sequence with the ids that it has."""
        if self._most:
            self._histories[key] = _History((*prompt_ids, *output_ids))

    def close(self, key: SequenceKey) -> None:
        """Forgets a sequence; one that was never opened too."""
        self._histories.pop(key, None)

    def guess(self, slices: Sequence[Slice]) -> list[Sequence[int]]:
        """What to compute behind each slice's own ids: as much as is worth its time.

        A row more costs a row's time. With probability p it saves as much later on, and a decode's part of a pass over
        the weights.
        """
        if not self._most:
            return [()] * len(slices)
        decodes = sum(s.samples for s in slices)
        worth = decodes / (decodes + PASS_ROWS)
        return [self._guess(s, worth) for s in slices]

    def learn(self, key: SequenceKey, tokens: Iterable[int]) -> None:
        """These were drawn, in this order."""
        if self._most:
            self._histories[key].add(tokens)

    def _guess(self, s: Slice, worth: float) -> Sequence[int]:
        room = s.draft_room(self._block_size)
        if not room:
            return ()
        history = self._histories[s.key]
        return history.guess(self._most)[: history.trusted(room, worth)]


class _History:
    """All ids of a sequence, its guess at the next ones, and how far it can be trusted."""

    def __init__(self, ids: Iterable[int]) -> None:
        self._ids = bytearray(array("i", ids).tobytes())  # in bytes, which are searched at the speed of memory
        self._guess: Sequence[int] = ()
        self._trust = _TRUST_AT_FIRST

    def guess(self, most: int) -> Sequence[int]:
        """What followed the last CONTEXT ids when they came before, at last; repeated where that leads up to here."""
        ids, size = self._ids, CONTEXT * _BYTES
        last = ids[-size:]
        at = ids.rfind(last, 0, -_BYTES)
        while at % _BYTES and at >= 0:  # found within ids
            at = ids.rfind(last, 0, at + size - 1)
        if at < 0:
            self._guess = ()
        else:
            following = array("i", bytes(ids[at + size : at + size + most * _BYTES])).tolist()
            self._guess = (following * most)[:most]
        return self._guess

    def trusted(self, room: int, worth: float) -> int:
        """How many ids of the guess are right with a probability of at least `worth`, up to `room`."""
        count, probability = 0, self._trust
        while count < room and probability >= worth and count < len(self._guess):
            count += 1
            probability *= self._trust
        return count

    def add(self, ids: Iterable[int]) -> None:
        """These came; the guess is judged by them, up to its first mistake."""
        came = array("i", ids)
        for guessed, token in zip(self._guess, came, strict=False):
            self._trust = _TRUST_KEPT * self._trust + (1 - _TRUST_KEPT) * (guessed == token)
            if guessed != token:
                break
        self._guess = ()
        self._ids += came.tobytes()
