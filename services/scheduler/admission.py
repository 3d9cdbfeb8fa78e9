"""Who may come in: what fits at all, how many at a time, and when a refused one should ask again."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from services.runtime.error_tree import InvalidRequest, Overloaded
from services.scheduler.engine.api import EngineInfo
from services.scheduler.policy import FIRST_COME, Policy
from services.scheduler.submission import Route, Submission

RETRY_S_MIN = 0.1
RETRY_S_MAX = 30.0
RETRY_S_UNKNOWN = 1.0
RATE_WINDOW_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a scheduler takes on.

    At most `max_running` sequences share a step of at most `max_step_tokens` tokens; `max_waiting` more may be open.
    `max_held` bounds all sequences that are remembered, ended but not yet released ones included. Tombstones go after
    `tombstone_ttl_s`, or, the oldest first, when there are more than `max_tombstones`. A tokenizer of which
    nothing is heard for `lease_grace_s` loses its attempts. What has waited for `queue_timeout_s` without a token ends.
    """

    max_running: int = 256
    max_waiting: int = 1024
    max_step_tokens: int = 512
    max_held: int = 16384
    max_tombstones: int = 65536
    tombstone_ttl_s: float = 300.0
    lease_grace_s: float = 60.0
    queue_timeout_s: float = 300.0
    policy: Policy = FIRST_COME
    prefix_cache: bool = True

    def __post_init__(self) -> None:
        if self.max_running < 1 or self.max_waiting < 0:
            raise ValueError("max_running must be at least 1 and max_waiting at least 0")
        if self.max_step_tokens < self.max_running:
            raise ValueError(
                "max_step_tokens must be at least max_running: each running sequence decodes a token a step"
            )
        if self.max_held < self.max_open:
            raise ValueError("max_held must be at least max_running + max_waiting")

    @property
    def max_open(self) -> int:
        """Sequences that may be waiting or running."""
        return self.max_running + self.max_waiting


def check_load(
    submission: Submission, limits: Limits, open_sequences: int, held: int, retry_after_s: Callable[[int], float]
) -> None:
    """Raises Overloaded while there is no place, InvalidRequest where there never is; a continuation always has one."""
    places = len(submission.choices)
    if places > limits.max_open:
        raise InvalidRequest("choices", f"must be at most {limits.max_open}, not {places}")
    # A continuation was admitted once: its caller already has part of the answer.
    if submission.continues:
        return
    if (excess := open_sequences + places - limits.max_open) > 0:
        message = f"the queue is full: {open_sequences} sequences are open"
        raise Overloaded(message, retry_after_s(excess), reason="QUEUE_FULL")
    if held + places > limits.max_held:
        raise Overloaded(f"{held} sequences are held and not released", reason="HELD_FULL")


def longest_sequence(info: EngineInfo) -> int:
    """Most tokens, prompt and output, of one sequence: what the context allows and an otherwise empty pool holds.

    The last token is never computed, so it needs no place in a block.
    """
    return min(info.context_length, info.total_blocks * info.block_size + 1)


def output_limit(submission: Submission, info: EngineInfo) -> int:
    """Most output tokens per choice, at least 1. Raises InvalidRequest for what can never be served here."""
    _check_ids(submission, info.vocab_size)
    _check_choices(submission)
    longest = longest_sequence(info)
    room = longest - len(submission.prompt_ids)
    if room < 1:
        why = "the context is" if longest == info.context_length else "the KV cache holds"
        raise InvalidRequest(
            "prompt_ids",
            f"must leave room for output: it has {len(submission.prompt_ids)} tokens, and {why} {longest} tokens",
        )
    return room if submission.max_tokens is None else min(submission.max_tokens, room)


def _check_ids(submission: Submission, vocab_size: int) -> None:
    # An id beyond the vocabulary would read beyond the embedding, for the whole batch.
    if not submission.prompt_ids:
        raise InvalidRequest("prompt_ids", "must not be empty")
    bias_ids = [token_id for token_id, _ in submission.sampling.logit_bias]
    for name, ids in (
        ("prompt_ids", submission.prompt_ids),
        ("stopping.stop_token_ids", submission.stop_token_ids),
        ("sampling.logit_bias", bias_ids),
        *((f"choices[{i}].output_ids", start.output_ids) for i, start in enumerate(submission.choices)),
    ):
        if ids and not (min(ids) >= 0 and max(ids) < vocab_size):
            wrong = next(token_id for token_id in ids if not 0 <= token_id < vocab_size)
            raise InvalidRequest(name, f"must hold token ids below {vocab_size}, not {wrong}")


def _check_choices(submission: Submission) -> None:
    if not submission.choices:
        raise InvalidRequest("choices", "must not be empty")
    if len({start.choice for start in submission.choices}) < len(submission.choices):
        raise InvalidRequest("choices", "must name each choice once")
    if submission.max_tokens is not None and submission.max_tokens < 1:
        raise InvalidRequest("stopping.max_tokens", "must be at least 1")
    wants = submission.sampling.logprobs is not None
    for index, start in enumerate(submission.choices):
        if len(start.output_logprobs) != (len(start.output_ids) if wants else 0):
            raise InvalidRequest(
                f"choices[{index}].output_logprobs", "must have one entry per output id, or none where none are wanted"
            )


class Tombstones:
    """Ids of released attempts, each kept for a while; a Submit that was overtaken by its Release is known by them.

    And whose each was, if it was anybody's: from whom it was claimed before must learn that, not that it is missing.
    """

    def __init__(self, *, ttl_s: float, max_count: int) -> None:
        self._ttl_s = ttl_s
        self._max_count = max_count
        self._buried: OrderedDict[int, tuple[float, Route | None]] = OrderedDict()

    def __contains__(self, attempt_id: int) -> bool:
        return attempt_id in self._buried

    def __len__(self) -> int:
        return len(self._buried)

    def owner_of(self, attempt_id: int) -> Route | None:
        """Whose a buried attempt was when it was released; None where it was never known, or is not buried."""
        return self._buried[attempt_id][1] if attempt_id in self._buried else None

    def add(self, attempt_id: int, now: float, owner: Route | None = None) -> None:
        """Buries an attempt, or, if it is buried already, starts its time anew."""
        _, earlier = self._buried.pop(attempt_id, (0.0, None))
        self._buried[attempt_id] = now, owner or earlier
        if len(self._buried) > self._max_count:
            self._buried.popitem(last=False)

    def forget_old(self, now: float) -> None:
        """Drops those whose time is over."""
        while self._buried:
            attempt_id, (buried_at, _) = next(iter(self._buried.items()))
            if now - buried_at < self._ttl_s:
                return
            del self._buried[attempt_id]


class EndRate:
    """How many sequences end per second, the last ten seconds weighing most."""

    __slots__ = ("_at", "_count")

    def __init__(self) -> None:
        self._at = 0.0
        self._count = 0.0

    def add(self, ended: int, now: float) -> None:
        """Sequences ended."""
        self._count = self._decayed(now) + ended
        self._at = now

    def retry_after_s(self, places: int, now: float) -> float:
        """When `places` places should have become free, seconds; a second where nothing has ended lately."""
        rate = self._decayed(now) / RATE_WINDOW_S
        if rate * RETRY_S_MAX < 1:
            return RETRY_S_UNKNOWN
        return min(max(places / rate, RETRY_S_MIN), RETRY_S_MAX)

    def _decayed(self, now: float) -> float:
        return self._count * math.exp(-max(now - self._at, 0.0) / RATE_WINDOW_S)
