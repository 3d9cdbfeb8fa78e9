"""Turns what a caller writes (a JSON schema, a regular expression, choices, a grammar) into masks over token ids.

The work is llguidance's: it derives from the text so far which tokens may follow, and enumerates no states beforehand.
Compiling takes milliseconds for ordinary schemas and seconds for the largest allowed; its own limits bound it, and it
lets go of the interpreter meanwhile.
"""

from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from services.protocol.request import Constraint, ConstraintKind
from services.runtime.error_tree import InvalidRequest
from services.runtime.heap import give_back
from services.scheduler.engine.api import GuideLost

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions  # the compiled module doesn't have it when it runs

JSON_FORM: JsonCompileOptions = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Where whitespace may grow, small models fill their whole limit with it."""

MAX_KEPT = 64
"""Compiled constraints that are kept for the next request; beyond it the longest unused goes."""

GRAMMAR_ROW_MAX, GRAMMAR_STEP_MAX = 500, 2_500
"""In how many rules a caller's grammar may be at one place, and what llguidance may look at for one token of it. Its
own 2,000 and 50,000 let an ambiguous grammar of two rules take over a second for a token, and the step waits for it."""

ROW_MAX = STEP_MAX = 10_000
"""The same for all else: a schema of 1,500 properties wants thousands of rules at once, and takes milliseconds."""

_ERROR_LENGTH_MAX = 300


class TokenGuide:
    """A Guide over one llguidance matcher."""

    __slots__ = ("_matcher",)

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def allowed(self) -> bytes:
        """See Guide."""
        mask: bytes = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            raise GuideLost(_first_lines(self._matcher.get_error()))
        return mask

    def accept(self, token_id: int) -> None:
        """See Guide."""
        if not self._matcher.consume_token(token_id):
            raise GuideLost(_first_lines(self._matcher.get_error()) or f"token {token_id} is not allowed here")


class TokenConstraint:
    """A CompiledConstraint: a matcher that has seen nothing. Every sequence gets a copy, which takes microseconds."""

    __slots__ = ("_matcher",)

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def start(self, output_ids: Sequence[int]) -> TokenGuide:
        """See CompiledConstraint."""
        guide = TokenGuide(self._matcher.deep_copy())
        for token_id in output_ids:
            guide.accept(token_id)
        return guide


class ConstraintCompiler:
    """Compiles for one vocabulary. Safe to use from several threads."""

    def __init__(self, tokenizer_json: Path, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._tokenizer_json = tokenizer_json
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._lock = Lock()
        self._tokenizer: LLTokenizer | None = None
        self._kept: OrderedDict[Constraint, TokenConstraint] = OrderedDict()

    def compile(self, constraint: Constraint) -> TokenConstraint:
        """Raises InvalidRequest, naming the field, for what is no such thing or allows no text at all."""
        with self._lock:
            if constraint in self._kept:
                self._kept.move_to_end(constraint)
                return self._kept[constraint]
        compiled = self._compile(constraint)
        with self._lock:
            self._kept[constraint] = compiled
            if len(self._kept) > MAX_KEPT:
                self._kept.popitem(last=False)
        return compiled

    def _compile(self, constraint: Constraint) -> TokenConstraint:
        # Imported when the first constraint comes: many a scheduler never sees one.
        from llguidance import LLMatcher, LLParserLimits

        limits = (
            LLParserLimits(max_items_in_row=GRAMMAR_ROW_MAX, step_max_items=GRAMMAR_STEP_MAX)
            if constraint.kind is ConstraintKind.GRAMMAR
            else LLParserLimits(max_items_in_row=ROW_MAX, step_max_items=STEP_MAX)
        )
        field = f"constraint.{constraint.kind.value}"
        try:
            matcher = LLMatcher(self._vocabulary(), _grammar(constraint), log_level=0, limits=limits)
        except ValueError as error:
            raise InvalidRequest(field, f"can't be read: {_first_lines(str(error))}") from error
        if matcher.is_error():
            raise InvalidRequest(field, f"can't be compiled: {_first_lines(matcher.get_error())}")
        # The first mask shows whether any text is allowed, and what it costs is paid here and not in a step.
        mask = matcher.compute_bitmask()
        if matcher.is_error() or not any(mask):
            raise InvalidRequest(field, f"allows no text: {_first_lines(matcher.get_error())}")
        return TokenConstraint(matcher)

    def _vocabulary(self) -> LLTokenizer:
        """Made when it is first needed: it takes a second and tens of megabytes."""
        from llguidance import LLTokenizer

        with self._lock:
            if self._tokenizer is None:
                text = self._tokenizer_json.read_text(encoding="utf-8")
                self._tokenizer = LLTokenizer(text, n_vocab=self._vocab_size, eos_token=self._eos_token_ids)
                give_back()
            return self._tokenizer


def _grammar(constraint: Constraint) -> str:
    from llguidance import LLMatcher

    text = constraint.texts[0]
    match constraint.kind:
        case ConstraintKind.JSON_SCHEMA:
            return LLMatcher.grammar_from_json_schema(text, defaults=JSON_FORM)
        case ConstraintKind.REGEX:
            return LLMatcher.grammar_from_regex(text)
        case ConstraintKind.CHOICES:
            # One lexeme: as rules of a grammar they would all stand in the parser's row, which is bounded.
            choices = " | ".join(map(_quoted, constraint.texts))
            return LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {choices}")
        case ConstraintKind.GRAMMAR:
            return LLMatcher.grammar_from_lark(text)


def _quoted(text: str) -> str:
    """Lark writes strings as JSON does, but for one character."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")


def _first_lines(message: str) -> str:
    """llguidance appends its whole state to some messages."""
    return message.partition("<state>")[0].strip()[:_ERROR_LENGTH_MAX]
