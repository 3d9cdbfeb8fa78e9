"""Who goes first: every policy is a head start, in seconds, before those that came at the same moment.

So nobody waits for ever, whatever comes after it: a head start is finite, and each newcomer has to make up for having
come later. First come first served is the policy without one, but for continuations, whose callers came long before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

from services.scheduler.engine.api import SequenceKey
from services.scheduler.submission import Submission

PolicyName = Literal["fcfs", "longest-prefix", "priority"]

CACHED_TOKEN_S = 0.01
"""With longest-prefix: what a token in the prefix cache is worth. A prefix of 512 goes before who came 5 s earlier."""


CONTINUED_S = 60.0
"""What goes on after its scheduler died goes before prompts that came within the last minute: it is being read."""


class Rank(NamedTuple):
    """A place in the order; the smaller goes first. The key tells apart what came at the same moment."""

    moment: float
    key: SequenceKey


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """`priority_step_s` is the head start that one level of priority gives."""

    name: PolicyName = "fcfs"
    priority_step_s: float = 10.0

    def rank(self, submission: Submission, arrived_at: float, key: SequenceKey) -> Rank:
        """Where a sequence stands, for good: it is preempted after those before it, and comes back before the rest."""
        head_start = submission.priority * self.priority_step_s if self.name == "priority" else 0.0
        if submission.continues:
            head_start += CONTINUED_S
        return Rank(arrived_at - head_start, key)

    @property
    def by_prefix(self) -> bool:
        """Whether the prefix cache has a say in who is next."""
        return self.name == "longest-prefix"

    def rank_with_prefix(self, rank: Rank, cached_tokens: int) -> Rank:
        """Where a waiting sequence stands now that so much of it need not be computed."""
        return Rank(rank.moment - cached_tokens * CACHED_TOKEN_S, rank.key)


FIRST_COME = Policy()
