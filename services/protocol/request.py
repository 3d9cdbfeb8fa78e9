"""A request after it was found valid: every default filled in, every value in its range, no protobuf."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

MAX_CHOICES = 128
MAX_MESSAGES = 4096
MAX_STOPS = 64
MAX_STOP_LENGTH = 1024
MAX_LOGIT_BIAS = 1024
MAX_LOGPROBS = 20
MAX_TEMPERATURE = 100.0
MAX_PRIORITY = 100
MAX_CONSTRAINT_BYTES = 64 << 10
GREEDY_BELOW = 1e-4
"""Temperatures below it would overflow logits in fp32; they are served as greedy, which is their limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are drawn; see SamplingParams in the contract. `seed` None: not chosen by the caller."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    logit_bias: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Stopping:
    """When a choice ends; see StopConditions. `max_tokens` None: what the context leaves."""

    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = None
    min_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TextOptions:
    """How ids become text."""

    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = False


class ConstraintKind(Enum):
    """How a constraint is written; each is a field of the contract's Constraint."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICES = "choices"
    GRAMMAR = "grammar"


@dataclass(frozen=True, slots=True)
class Constraint:
    """What the text of an answer must be: one text, or for CHOICES all of them."""

    kind: ConstraintKind
    texts: tuple[str, ...]


class OnDisconnect(Enum):
    """What becomes of a request whose caller left."""

    ABORT = "abort"
    DETACH = "detach"


class Failover(Enum):
    """What becomes of a request whose scheduler died."""

    CONTINUE = "continue"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: str
    content: str


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """A text to be continued; special tokens are put before it."""

    text: str


@dataclass(frozen=True, slots=True)
class IdsPrompt:
    """Ids to be continued, as they are."""

    ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """A conversation to be answered."""

    messages: tuple[Message, ...]


Prompt = TextPrompt | IdsPrompt | ChatPrompt


@dataclass(frozen=True, slots=True, kw_only=True)
class ValidRequest:
    """A request that can be served as far as can be told without its prompt's length.

    `request_id` "": the caller gave none. Times are in milliseconds; 0 means none. `logprobs`: None for none, otherwise
    the number of alternatives per token.
    """

    request_id: str
    prompt: Prompt
    n: int = 1
    sampling: Sampling = Sampling()
    stopping: Stopping = Stopping()
    text: TextOptions = TextOptions()
    token_info: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    timeout_ms: int = 0
    whole: bool = False
    on_disconnect: OnDisconnect = OnDisconnect.ABORT
    detach_ttl_ms: int = 0
    retain_ms: int = 0
    failover: Failover = Failover.CONTINUE
    constraint: Constraint | None = None
    priority: int = 0
