"""One sequence on its way from ids to text: what may leave after each token, and how it ends.

The law of delivery. Let e(j) be the length of the text after j tokens, in code points, and R how much of it has left
after k tokens: e(k) without what is held back. Token j leaves with the text that it gave: as soon as e(j-1) < R, or,
for one that gave none, as soon as all the text that it could belong to has left. So text never runs ahead of its ids,
what has left after k tokens depends on these tokens and the plan alone, and nothing that left is ever taken back.
"""

from __future__ import annotations

from collections.abc import Sequence as Ids
from typing import NamedTuple

from services.detokenizer.batch import SequenceEnd, SequenceStart, TextBatch, TextFinish
from services.detokenizer.state import Happening, Phase, ProtocolError, after
from services.detokenizer.stopper import Match, Stopper
from services.protocol.events import (
    EndOfText,
    ErrorCode,
    Failure,
    FinishReason,
    StopMatch,
    StopText,
    StopToken,
    TokenInfo,
    TopLogprob,
)
from services.text.incremental import IncrementalDecoder
from services.text.vocabulary import UnknownTokenId, Vocabulary


class Logprobs(NamedTuple):
    """Natural logarithms of probabilities at one output position: the token's own, and the likeliest, best first."""

    logprob: float
    top_ids: Ids[int] = ()
    top_logprobs: Ids[float] = ()


class _Waiting(NamedTuple):
    """A token that hasn't left: where its text starts, and where it ends at the least."""

    token_id: int
    start: int
    end: int
    shown: TokenInfo | None


class _Candidate(NamedTuple):
    """Where the text stood before a token at which the engine may have ended the sequence."""

    text_end: int
    incomplete: bool


class Sequence:
    """The state of one sequence: bounded by what is held back, whatever its length.

    `received` counts the tokens that came, `text_end` the code points they gave. While it is `quick`, nothing is held
    back, and a plain token that has none of the `first_characters` (of its stops) and isn't one of the `end_token_ids`
    leaves at once with its plain text: the core's hot loop then does all there is to do.
    """

    __slots__ = (
        "_candidate",
        "_decoder",
        "_number",
        "_plan",
        "_stopper",
        "_texts",
        "_unsent",
        "_vocabulary",
        "_waiting",
        "choice",
        "end_token_ids",
        "first_characters",
        "phase",
        "quick",
        "received",
        "text_end",
    )

    def __init__(self, vocabulary: Vocabulary, start: SequenceStart) -> None:
        plan = start.plan
        self.choice = start.choice
        self._number = start.sequence
        self._plan = plan
        self._vocabulary = vocabulary
        self._decoder = IncrementalDecoder(
            vocabulary,
            skip_special_tokens=plan.skip_special_tokens,
            spaces_between_special_tokens=plan.spaces_between_special_tokens,
            begins_text=plan.begins_text,
        )
        self._stopper = Stopper(plan.stop)
        self.end_token_ids = frozenset() if plan.include_stop_in_output else plan.end_token_ids
        self._candidate: _Candidate | None = None
        self._waiting: list[_Waiting] = []
        self._texts: list[str] = []  # the text that hasn't left,
        self._unsent = 0  # and its length
        self.first_characters = self._stopper.first_characters
        self.phase = Phase.OPEN
        self.received = 0
        self.text_end = 0
        self.quick = self._may_be_quick()

    @property
    def tokens_sent(self) -> int:
        """Tokens that have left."""
        return self.received - len(self._waiting)

    @property
    def held_for_stop(self) -> int:
        """Code points that may begin a stop text, or are the stop token's."""
        return self.text_end - self._released()

    @property
    def incomplete_character(self) -> bool:
        """Whether the first bytes of a character wait for the rest."""
        return bool(self._decoder.incomplete)

    def tokens(self, ids: Ids[int], logprobs: Ids[Logprobs] | None, batch: TextBatch) -> None:
        """The next tokens. `logprobs`: one per id, or None. Raises ProtocolError after the engine's end."""
        self.phase = after(self.phase, Happening.TOKENS)
        place = 0
        while place < len(ids) and self.phase is Phase.OPEN:
            if self.quick and (passed := self._pass(ids, place, batch)):
                place += passed
                continue
            self._take(ids[place], logprobs[place] if logprobs else None, batch)
            place += 1
        self.received += len(ids) - place
        if self.phase is Phase.OPEN and not self.quick:
            self._send(self._released(), batch)

    def end(self, end: SequenceEnd, batch: TextBatch) -> None:
        """The engine's end: a finish, unless there has been one. Raises ProtocolError when tokens are missing."""
        if end.token_offset != self.received:
            raise ProtocolError(f"an end at token {end.token_offset} after {self.received} tokens")
        finished = self.phase is not Phase.OPEN
        self.phase = after(self.phase, Happening.END)
        if finished:
            return
        if self._candidate is not None and isinstance(end.stop, StopToken | EndOfText):
            self._leave_out(self._candidate)
        else:
            self._append(self._decoder.finish())
        self._finish(batch, end.reason, stop=end.stop, error=end.error)

    def _may_be_quick(self) -> bool:
        """Whether nothing is held back, and a plain token that begins no stop needs no more than a look-up."""
        return self._decoder.settled and self._stopper.idle and self._candidate is None and not self._plan.token_info

    def _pass(self, ids: Ids[int], place: int, batch: TextBatch) -> int:
        """Lets the tokens from `place` on leave that need no more than a look-up; how many these were."""
        plain, texts = self._vocabulary.plain, []
        for index in range(place, len(ids)):
            text = plain.get(ids[index])
            if text is None or ids[index] in self.end_token_ids or not self.first_characters.isdisjoint(text):
                break
            texts.append(text)
        if texts:
            joined, end = "".join(texts), place + len(texts)
            batch.add_row(self._number, self.received, ids[place:end], self.text_end, joined)
            self.received += len(texts)
            self.text_end += len(joined)
        return len(texts)

    def _take(self, token_id: int, logprobs: Logprobs | None, batch: TextBatch) -> None:
        """Takes one token in, which may end the sequence."""
        try:
            match = self._push(token_id, logprobs)
        except UnknownTokenId as error:
            self._fail(error, batch)
            return
        if match is not None:
            self._stop(match, batch)
            return
        self.quick = self._may_be_quick()
        if self.quick:
            self._send(self._released(), batch)

    def _push(self, token_id: int, logprobs: Logprobs | None) -> Match | None:
        """The stop that one more token completed. Raises UnknownTokenId, and then nothing has changed."""
        start, was_incomplete = self.text_end, bool(self._decoder.incomplete)
        info = self._info(token_id, logprobs) if self._plan.token_info else None
        text = self._decoder.push(token_id)
        self.received += 1
        self._append(text)
        self._waiting.append(_Waiting(token_id, start, self.text_end + bool(self._decoder.incomplete), info))
        effective = self.received >= self._plan.min_tokens
        self._candidate = _Candidate(start, was_incomplete) if effective and token_id in self.end_token_ids else None
        return self._stopper.push(text, self._decoder.hidden, effective=effective)

    def _append(self, text: str) -> None:
        if text:
            self._texts.append(text)
            self._unsent += len(text)
            self.text_end += len(text)

    def _released(self) -> int:
        """How much of the text may leave now."""
        released = self.text_end - self._stopper.held
        return released if self._candidate is None else min(released, self._candidate.text_end)

    def _send(self, released: int, batch: TextBatch) -> None:
        """Lets the text up to `released` leave, and the tokens that go with it."""
        count = 0
        for token in self._waiting:
            if token.start >= released and token.end > released:
                break
            count += 1
        if count or released > self.text_end - self._unsent:
            self._send_row(count, released, batch)

    def _send_row(self, count: int, released: int, batch: TextBatch) -> None:
        text, text_offset = "".join(self._texts), self.text_end - self._unsent
        length = released - text_offset
        tokens = self._waiting[:count]
        batch.add_row(
            self._number,
            self.tokens_sent,
            [token.token_id for token in tokens],
            text_offset,
            text[:length],
            [token.shown for token in tokens if token.shown is not None],
        )
        del self._waiting[:count]
        self._unsent = self.text_end - released
        self._texts = [text[length:]] if self._unsent else []

    def _stop(self, match: Match, batch: TextBatch) -> None:
        """A stop text was completed by the last token: the text ends before it, or with it."""
        cut = match.end_back if self._plan.include_stop_in_output else match.start_back
        self.text_end -= cut
        self._unsent -= cut
        self.phase = after(self.phase, Happening.CUT)
        self._finish(batch, FinishReason.STOP, stop=StopText(match.stop))

    def _fail(self, unknown: UnknownTokenId, batch: TextBatch) -> None:
        """The model gave an id that doesn't exist: the sequence ends before it."""
        self._append(self._decoder.finish())
        self.phase = after(self.phase, Happening.CUT)
        failure = Failure(ErrorCode.BAD_MODEL_OUTPUT, f"the model's output is broken: {unknown}")
        self._finish(batch, FinishReason.ERROR, error=failure)
        self.received += 1

    def _leave_out(self, candidate: _Candidate) -> None:
        """The last token was the end: its text goes, and a character that it would have completed is incomplete."""
        left_out = self.text_end - candidate.text_end
        self._texts = ["".join(self._texts)[: self._unsent - left_out]]
        self._unsent -= left_out
        self.text_end = candidate.text_end
        self._append("\ufffd" if candidate.incomplete else "")

    def _finish(
        self, batch: TextBatch, reason: FinishReason, *, stop: StopMatch | None = None, error: Failure | None = None
    ) -> None:
        """Lets everything up to the end leave, and says how it ended. The phase is already the next one."""
        self.quick = False
        if self._waiting or self._unsent:
            self._send_row(len(self._waiting), self.text_end, batch)
        batch.finishes.append(
            TextFinish(
                sequence=self._number,
                token_offset=self.received,
                text_offset=self.text_end,
                reason=reason,
                stop=stop,
                error=error,
            )
        )
        self._texts = []

    def _info(self, token_id: int, logprobs: Logprobs | None) -> TokenInfo:
        return token_info(token_id, self._decoder.contribution(token_id), logprobs, self._vocabulary)


def token_info(token_id: int, shown: bytes, logprobs: Logprobs | None, vocabulary: Vocabulary) -> TokenInfo:
    """What is told of a token whose bytes are `shown`; its alternatives are shown with bytes of their own."""
    if logprobs is None:
        return TokenInfo(token_id, shown)
    bytes_of = vocabulary.bytes_of
    top = zip(logprobs.top_ids, logprobs.top_logprobs, strict=True)
    return TokenInfo(
        token_id, shown, logprobs.logprob, tuple(TopLogprob(other, value, bytes_of(other)) for other, value in top)
    )
