"""Finds the first stop text in a growing text, and says how much of the text's end may still become one.

The rule, token by token: after each token, the matches that this token completed are looked at. The one that begins
first wins; of those that begin at the same place the longest. A match that is completed before the output has
`min_tokens` tokens is passed over; it may begin anywhere. Held back is the longest end of the text that is a true
prefix of some stop.

A special token that isn't shown is looked at as well, at the place where it stands: so it can be a stop, or part of
one. What is said about places counts shown characters only.

The automaton is that of Aho and Corasick ("Efficient string matching", 1975), with nodes made when the text first
reaches them: a request with many long stops costs nothing until then, and each character is looked at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Match:
    """A stop text was found. `start_back` and `end_back`: shown characters from its start and end to the text's end."""

    stop: str
    start_back: int
    end_back: int


class Stopper:
    """The stop texts of one sequence against its text.

    `held` is the number of shown characters at the end that may yet belong to a stop. `idle` says that no stop has
    begun; then a text without any of `first_characters` can be passed by.
    """

    __slots__ = ("_gaps", "_node", "_root", "_window", "first_characters", "held", "idle")

    def __init__(self, stops: Iterable[str]) -> None:
        self._root = self._node = _Node(tuple(stop for stop in stops if stop), 0, None)
        self._window = 0  # the characters held back, hidden ones included
        self._gaps: list[tuple[int, int]] = []  # where, in the window, hidden ones stand
        self.first_characters = frozenset(self._root.branches)
        self.held = 0
        self.idle = True

    def push(self, shown: str, hidden: str = "", *, effective: bool = True) -> Match | None:
        """Looks at what one token added: text, then text that is not shown. `effective`: a match may end the output.

        After a match the output has ended, and nothing more may be pushed.
        """
        text = shown + hidden
        if self.idle and self.first_characters.isdisjoint(text):
            return None
        length = self._window + len(text)
        if hidden:
            self._gaps.append((length - len(hidden), length))
        found = self._walk(text)
        if found is not None and effective:
            start, stop = found
            return Match(stop, self._shown(start, length), self._shown(start + len(stop), length))
        self._hold(length)
        return None

    def _walk(self, text: str) -> tuple[int, str] | None:
        """Moves the automaton; the best match that the text completes, with its start in the window."""
        node, found, start_found = self._node, None, 0
        for end, character in enumerate(text, self._window + 1):
            node = node.step(character)
            stop = node.complete
            if stop is not None and (found is None or end - len(stop) <= start_found):
                found, start_found = stop, end - len(stop)
        self._node = node
        return None if found is None else (start_found, found)

    def _hold(self, length: int) -> None:
        """Forgets what can't belong to a stop any more."""
        self._window = self._node.held
        passed = length - self._window
        if self._gaps:
            self._gaps = [(max(start - passed, 0), end - passed) for start, end in self._gaps if end > passed]
        self.held = self._shown(0, self._window)
        self.idle = self._node is self._root

    def _shown(self, start: int, length: int) -> int:
        """How many characters of a window of that length are shown from `start` on."""
        return length - start - sum(max(0, gap_end - max(gap_start, start)) for gap_start, gap_end in self._gaps)


class _Node:
    """A prefix of some stops that the text's end equals; the longest such prefix is where the automaton stands.

    `branches` has, by next character, the stops that go on with it. `fallback` is the longest true suffix of this
    prefix that is a prefix of a stop, too. `complete` is the longest stop that ends here; `held` the length of the
    longest end that is a true prefix.
    """

    __slots__ = ("_children", "_depth", "_fallback", "branches", "complete", "held")

    def __init__(self, stops: tuple[str, ...], depth: int, fallback: _Node | None) -> None:
        self._children: dict[str, _Node] = {}
        self._depth = depth
        self._fallback = fallback
        self.branches: dict[str, tuple[str, ...]] = {}
        self.complete: str | None = fallback.complete if fallback else None
        for stop in stops:
            if len(stop) == depth:
                self.complete = stop
            else:
                self.branches[stop[depth]] = (*self.branches.get(stop[depth], ()), stop)
        self.held: int = depth if self.branches or fallback is None else fallback.held

    def step(self, character: str) -> _Node:
        """Where the automaton stands after one more character."""
        node = self
        while (child := node._child(character)) is None:
            if node._fallback is None:
                return node
            node = node._fallback
        return child

    def _child(self, character: str) -> _Node | None:
        child = self._children.get(character)
        if child is None and character in self.branches:
            fallback = self._fallback.step(character) if self._fallback else self
            child = self._children[character] = _Node(self.branches[character], self._depth + 1, fallback)
        return child
