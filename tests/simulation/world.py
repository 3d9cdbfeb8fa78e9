"""Virtual time: what happens next in the whole world, and in what words it is told.

Everything that takes time stands on one agenda: timers, messages on their way, engine steps, faults. The earliest is
taken, time jumps to it, and it happens; at one moment, things happen in the order in which they were put down. All
chance comes from one seed, so a seed is a run.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable
from random import Random

MAX_HAPPENINGS = 400_000
"""More than that in one run is a loop that never rests."""

Act = Callable[[], object]


class Violation(AssertionError):
    """A promise was broken; the message says which and by whom."""


class World:
    """The agenda, the chance and the story of one run. `now` is in virtual seconds."""

    def __init__(self, seed: int, *, tells: bool = False) -> None:
        self.now = 0.0
        self.random = Random(seed)
        self.counts: Counter[str] = Counter()
        self.story: list[str] = []
        self.tells = tells
        self.violation: Violation | None = None
        self.over = False
        self._agenda: list[tuple[float, int, Act]] = []
        self._count = 0

    def at(self, when: float, act: Act) -> None:
        """Has something happen at a moment; a past one means now."""
        self._count += 1
        heapq.heappush(self._agenda, (max(when, self.now), self._count, act))

    def after(self, delay_s: float, act: Act) -> None:
        """Has something happen after a while."""
        self.at(self.now + delay_s, act)

    def run(self, until: float) -> None:
        """Lets things happen up to a moment. Raises the first Violation."""
        agenda = self._agenda
        while agenda and agenda[0][0] <= until:
            self.now, _, act = heapq.heappop(agenda)
            act()
            if self.violation is not None:
                raise self.violation
            if self._count > MAX_HAPPENINGS:
                raise Violation(f"more than {MAX_HAPPENINGS} things have happened: something never rests")
        if self.violation is not None:
            raise self.violation
        self.now = max(self.now, until)

    def stop(self) -> None:
        """The run is over: nothing that was planned happens any more, and nothing is judged."""
        self.over = True
        self._agenda.clear()

    def tell(self, who: str, what: str) -> None:
        """One line of the story. Ask `tells` first where making the line costs."""
        if self.tells and not self.over:
            self.story.append(f"{self.now:9.4f}  {who:<12} {what}")

    def count(self, what: str) -> None:
        """One more of this kind, for the table of what a simulation has reached."""
        self.counts[what] += 1

    def violated(self, what: str) -> None:
        """A promise was broken; the run ends with the first one, after the current happening."""
        if self.violation is None:
            self.violation = Violation(what)
            self.tell("!!!", what)

    def chance(self, probability: float) -> bool:
        """Whether something of this probability happens."""
        return self.random.random() < probability
