"""What an answer's stream consists of: Started, any number of Delta, one Finish per choice, and one Completed, last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum


class FinishReason(Enum):
    """Why a choice ended."""

    STOP = 1
    LENGTH = 2
    ABORTED = 3
    DEADLINE = 4
    ERROR = 5


class AbortOutcome(Enum):
    """What an abort met."""

    ABORTING = 1
    ALREADY_FINISHED = 2
    NOT_FOUND = 3


@dataclass(frozen=True, slots=True)
class TopLogprob:
    """One alternative at an output position; `logprob` is a natural logarithm."""

    token_id: int
    logprob: float
    bytes: bytes


@dataclass(frozen=True, slots=True)
class TokenInfo:
    """One output token with its own bytes (not always whole characters); `logprob` None unless asked for."""

    token_id: int
    bytes: bytes
    logprob: float | None = None
    top: tuple[TopLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Usage:
    """What a request cost, in tokens; the prompt is counted once, the output summed over the choices."""

    prompt_tokens: int
    cached_prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """The request was accepted."""

    request_id: str
    resume_token: bytes
    model: str
    created_unix_ms: int
    prompt_tokens: int
    seed: int


@dataclass(frozen=True, slots=True)
class Delta:
    """More of a choice, never cumulative; the offsets count its tokens and Unicode code points after this delta."""

    choice: int
    text: str
    token_ids: Sequence[int]
    next_token_offset: int
    next_text_offset: int
    tokens: Sequence[TokenInfo] = ()


@dataclass(frozen=True, slots=True)
class Finish:
    """A choice ended.

    With STOP, `stop` is the stop text, or the stop token's or end-of-text's id; with ERROR, `error` says what happened.
    """

    choice: int
    reason: FinishReason
    output_tokens: int
    stop: str | int | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Completed:
    """All choices ended; nothing follows. `prompt`: the prompt's tokens, where its logprobs were asked for."""

    usage: Usage
    prompt: Sequence[TokenInfo] = ()


Event = Started | Delta | Finish | Completed


@dataclass(frozen=True, slots=True)
class Choice:
    """One whole answer."""

    text: str
    token_ids: Sequence[int]
    tokens: Sequence[TokenInfo]
    finish: Finish


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole stream, joined."""

    started: Started
    choices: Sequence[Choice]
    usage: Usage


@dataclass(frozen=True, slots=True)
class Model:
    """One served model; `context_length` is the longest prompt and output together, in tokens."""

    model_id: str
    context_length: int
    vocab_size: int
    created_unix_ms: int


@dataclass(frozen=True, slots=True)
class Tokens:
    """A text's ids, and the bytes that each stands for."""

    token_ids: Sequence[int]
    token_bytes: Sequence[bytes]
