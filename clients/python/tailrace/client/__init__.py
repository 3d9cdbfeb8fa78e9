"""The Python client of Tailrace: typed events, streams that can't end unnoticed, errors that say what to do."""

from tailrace.client.client import Client
from tailrace.client.errors import (
    AlreadyExists,
    ClientError,
    InvalidRequest,
    LawBroken,
    NotFound,
    Overloaded,
    Refused,
    StreamCut,
    Unreachable,
)
from tailrace.client.events import (
    AbortOutcome,
    Answer,
    Choice,
    Completed,
    Delta,
    Event,
    Finish,
    FinishReason,
    Model,
    Started,
    TokenInfo,
    Tokens,
    TopLogprob,
    Usage,
)
from tailrace.client.handle import Handle
from tailrace.client.options import Message, Options
from tailrace.client.stream import Stream

__all__ = [
    "AbortOutcome",
    "AlreadyExists",
    "Answer",
    "Choice",
    "Client",
    "ClientError",
    "Completed",
    "Delta",
    "Event",
    "Finish",
    "FinishReason",
    "Handle",
    "InvalidRequest",
    "LawBroken",
    "Message",
    "Model",
    "NotFound",
    "Options",
    "Overloaded",
    "Refused",
    "Started",
    "Stream",
    "StreamCut",
    "TokenInfo",
    "Tokens",
    "TopLogprob",
    "Unreachable",
    "Usage",
]
