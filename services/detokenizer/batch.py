"""What leaves the core: packed columns of rows, and what stands around them, as TextBatch in the contract has it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from services.detokenizer.plan import TextPlan
from services.protocol.events import Failure, FinishReason, StopMatch, TokenInfo
from services.runtime.trace import TraceContext

MAX_ROW_IDS = 4096
"""More ids than that (a replay's) are read and written in several rows, so that no row grows without bound."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceStart:
    """A sequence begins in this call, at token 0. `trace`: the span of whoever hands it on."""

    sequence: int
    attempt_id: int
    choice: int
    plan: TextPlan
    trace: TraceContext | None = None


@dataclass(frozen=True, slots=True)
class SequencePrompt:
    """A sequence's prompt has been computed."""

    sequence: int
    cached_prompt_tokens: int
    tokens: tuple[TokenInfo, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SequenceEnd:
    """The engine ended a sequence; `token_offset` counts its tokens, the stop token included."""

    sequence: int
    token_offset: int
    reason: FinishReason
    stop: StopMatch | None = None
    error: Failure | None = None
    cached_prompt_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TextFinish:
    """The one finish of a sequence: tokens and code points of its whole output, and why it ended."""

    sequence: int
    token_offset: int
    text_offset: int
    reason: FinishReason
    stop: StopMatch | None = None
    error: Failure | None = None


class TextBatch:
    """News of many sequences, in order within each: starts, prompts, rows (in columns), finishes, engine ends."""

    __slots__ = (
        "engine_ends",
        "finishes",
        "prompts",
        "released_attempt_ids",
        "row_tokens",
        "sequences",
        "starts",
        "text_offsets",
        "texts",
        "token_counts",
        "token_ids",
        "token_offsets",
    )

    def __init__(self) -> None:
        self.starts: list[SequenceStart] = []
        self.prompts: list[SequencePrompt] = []
        self.sequences: list[int] = []
        self.token_offsets: list[int] = []
        self.token_counts: list[int] = []
        self.token_ids: list[int] = []
        self.text_offsets: list[int] = []
        self.texts: list[str] = []
        self.row_tokens: dict[int, list[TokenInfo]] = {}
        self.finishes: list[TextFinish] = []
        self.engine_ends: list[SequenceEnd] = []
        self.released_attempt_ids: list[int] = []

    def __bool__(self) -> bool:
        return bool(self.sequences or self.starts or self.finishes or self.engine_ends or self.released_attempt_ids)

    def add_row(
        self,
        sequence: int,
        token_offset: int,
        token_ids: Sequence[int],
        text_offset: int,
        text: str,
        tokens: Sequence[TokenInfo] = (),
    ) -> None:
        """Adds a row, or more to the last one if it is the same sequence's and doesn't grow too long."""
        if self.sequences and self.sequences[-1] == sequence and self.token_counts[-1] + len(token_ids) <= MAX_ROW_IDS:
            self._add_to_last_row(token_ids, text, tokens)
            return
        if tokens:
            self.row_tokens[len(self.sequences)] = [*tokens]
        self.sequences.append(sequence)
        self.token_offsets.append(token_offset)
        self.token_counts.append(len(token_ids))
        self.token_ids += token_ids
        self.text_offsets.append(text_offset)
        self.texts.append(text)

    def _add_to_last_row(self, token_ids: Sequence[int], text: str, tokens: Sequence[TokenInfo]) -> None:
        if tokens:
            self.row_tokens.setdefault(len(self.sequences) - 1, []).extend(tokens)
        self.token_counts[-1] += len(token_ids)
        self.token_ids += token_ids
        self.texts[-1] += text
