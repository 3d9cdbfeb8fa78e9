"""What a process shows of itself and of what it remembers.

Durations are milliseconds, moments microseconds since 1970 UTC. Never a prompt or an output: those are in `Content`,
which is shown only where it was asked for and allowed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from services.protocol.hello import Hello


class Moment(NamedTuple):
    """Something that happened to a request."""

    what: str
    unix_us: int


class RouteKey(NamedTuple):
    """One tokenizer's stream from one scheduler."""

    tokenizer: str
    tokenizer_epoch: int
    generation: int = 0


class ReaderView(NamedTuple):
    """Who reads an answer in the tokenizer; `gateway_epoch` 0 is a direct caller. Tokens sent, one per choice."""

    gateway_epoch: int = 0
    stream_id: int = 0
    token_offsets: Sequence[int] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChoiceView:
    """Where a choice stands in one process; tokens, code points, blocks and milliseconds."""

    choice: int
    log_token_offset: int = 0
    log_text_offset: int = 0
    cursor_token_offset: int = 0
    blocks: int = 0
    idle_ms: int = 0
    phase: str = ""
    finish_reason: str = ""
    held_for_stop: int = 0
    incomplete_character: bool = False
    preemptions: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestView:
    """What one process remembers of one request."""

    request_id: str = ""
    attempt_id: int = 0
    caller_phase: str = ""
    engine_phase: str = ""
    age_ms: int = 0
    choices: Sequence[ChoiceView] = ()
    tenant: str = ""
    moments: Sequence[Moment] = ()
    fence: int = 0
    upstream: str = ""
    upstream_epoch: int = 0
    route: RouteKey | None = None
    attempts: int = 0
    readers: Sequence[ReaderView] = ()
    prompt_tokens: int = 0
    deadline_in_ms: int | None = None
    stream_id: int = 0
    whole: bool = False
    waits_for: str = ""
    ended: bool = False
    finished_ms: int | None = None

    @property
    def idle_ms(self) -> int:
        """Since the last progress of the choice that has waited longest; the request's age where none is known."""
        return max((choice.idle_ms for choice in self.choices), default=self.age_ms)


@dataclass(frozen=True, slots=True, kw_only=True)
class HopView:
    """One long-lived stream, as its receiver sees it: `what` is tokens, text, events or load."""

    what: str
    sender: str
    scheduler: str = ""
    hello: Hello | None = None
    up: bool = False
    why_not: str = ""
    since_ms: int = 0
    silent_ms: int = 0
    route: RouteKey | None = None
    calls: int = 0
    lag_ms: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteView:
    """One route at its scheduler: its highest generation, whether it is read, and how many logs are kept for it."""

    route: RouteKey
    read: bool
    sequences: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerView:
    """A scheduler's queue, memory and step loop; `step_ms` None: between steps."""

    waiting: int = 0
    running: int = 0
    running_max: int = 0
    free_blocks: int = 0
    cached_blocks: int = 0
    total_blocks: int = 0
    block_size: int = 0
    step_ms: int | None = None
    stepped_ms: int | None = None
    stalled: bool = False
    routes: Sequence[RouteView] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessView:
    """How a process stands."""

    name: str = ""
    service: str = ""
    phase: str = ""
    ready: bool = False
    not_ready_why: str = ""
    uptime_ms: int = 0
    unix_us: int = 0
    hops: Sequence[HopView] = ()
    output_tokens: int = 0
    scheduler: SchedulerView | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """What a caller wrote and was answered."""

    prompt_ids: Sequence[int] = ()
    prompt: str = ""
    outputs: Sequence[str] = ()
