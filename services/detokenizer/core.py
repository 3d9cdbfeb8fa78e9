"""All sequences of one call: events of the token stream in, a batch of text out. No input or output, no clock."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Ids

from services.detokenizer.batch import SequenceEnd, SequencePrompt, SequenceStart, TextBatch
from services.detokenizer.sequence import Logprobs, Sequence, token_info
from services.detokenizer.state import Phase, ProtocolError
from services.text.vocabulary import Vocabulary


class Core:
    """The state of one StreamText call; it can be rebuilt from the ids, and dies with the call.

    `wasted_tokens` counts those that came after a stop had ended their output.

    What comes in is turned into text at once; what has become of it since the last `take` is merged into one batch.
    Every method raises ProtocolError when the stream breaks its rules; the call must then end.
    """

    __slots__ = ("_attempts", "_batch", "_sequences", "_vocabulary", "wasted_tokens")

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._sequences: dict[int, Sequence] = {}
        self._attempts: dict[int, list[int]] = {}
        self._batch = TextBatch()
        self.wasted_tokens = 0

    def start(self, start: SequenceStart) -> None:
        """A sequence begins."""
        if start.sequence in self._sequences:
            raise ProtocolError(f"sequence {start.sequence} begins twice")
        self._sequences[start.sequence] = Sequence(self._vocabulary, start)
        self._attempts.setdefault(start.attempt_id, []).append(start.sequence)
        self._batch.starts.append(start)

    def prompt(self, number: int, cached_prompt_tokens: int, ids: Ids[int], logprobs: Ids[Logprobs | None]) -> None:
        """A sequence's prompt has been computed; its row, which follows, makes a batch of it.

        `ids` are the prompt's where its logprobs were asked for; `logprobs` has one entry for each, the first None.
        """
        if number not in self._sequences:
            raise self._misplaced(number, 0)
        if ids and len(ids) != len(logprobs):
            raise ProtocolError(f"sequence {number}: {len(logprobs)} logprobs for a prompt of {len(ids)}")
        vocabulary = self._vocabulary
        tokens = tuple(
            token_info(token_id, vocabulary.bytes_of(token_id), one, vocabulary)
            for token_id, one in zip(ids, logprobs, strict=False)
        )
        self._batch.prompts.append(SequencePrompt(number, cached_prompt_tokens, tokens))

    def column(self, numbers: Iterable[int], token_offsets: Iterable[int], ids: Iterable[int]) -> None:
        """One token each for many sequences: `tokens` for what nearly every step brings, as one loop without a call.

        It is the only code of this hop that runs once per token; a row that isn't quick takes the common way.
        """
        batch, sequences, plain = self._batch, self._sequences, self._vocabulary.plain
        add_sequence, add_token_offset, add_count = (
            batch.sequences.append,
            batch.token_offsets.append,
            batch.token_counts.append,
        )
        add_id, add_text_offset, add_text = batch.token_ids.append, batch.text_offsets.append, batch.texts.append
        for number, token_offset, token_id in zip(numbers, token_offsets, ids, strict=True):
            sequence = sequences.get(number)
            if sequence is not None and sequence.quick and sequence.received == token_offset:
                text = plain.get(token_id)
                first_characters = sequence.first_characters
                if (
                    text is not None
                    and token_id not in sequence.end_token_ids
                    and (not first_characters or first_characters.isdisjoint(text))
                ):
                    text_offset = sequence.text_end
                    add_sequence(number)
                    add_token_offset(token_offset)
                    add_count(1)
                    add_id(token_id)
                    add_text_offset(text_offset)
                    add_text(text)
                    sequence.received = token_offset + 1
                    sequence.text_end = text_offset + len(text)
                    continue
            self.tokens(number, token_offset, (token_id,))

    def tokens(self, number: int, token_offset: int, ids: Ids[int], logprobs: Ids[Logprobs] | None = None) -> None:
        """More tokens of a sequence, the first at `token_offset`; `logprobs` has one entry per id."""
        sequence = self._sequences.get(number)
        if sequence is None or sequence.received != token_offset:
            raise self._misplaced(number, token_offset)
        if logprobs is not None and len(logprobs) != len(ids):
            raise ProtocolError(f"sequence {number}: {len(logprobs)} logprobs for {len(ids)} ids")
        sequence.tokens(ids, logprobs, self._batch)
        if sequence.phase is not Phase.OPEN:
            self.wasted_tokens += len(ids) - (sequence.received - token_offset)

    def end(self, end: SequenceEnd) -> None:
        """The engine ended a sequence. That is always passed on, whoever finished it."""
        sequence = self._sequences.get(end.sequence)
        if sequence is None:
            raise self._misplaced(end.sequence, end.token_offset)
        sequence.end(end, self._batch)
        self._batch.engine_ends.append(end)

    def released(self, attempt_id: int) -> None:
        """The scheduler has forgotten an attempt; so does this."""
        for number in self._attempts.pop(attempt_id, ()):
            del self._sequences[number]
        self._batch.released_attempt_ids.append(attempt_id)

    def take(self) -> TextBatch | None:
        """What is new since the last time; None when nothing is."""
        if not self._batch:
            return None
        batch, self._batch = self._batch, TextBatch()
        return batch

    @property
    def known_attempts(self) -> int:
        """Attempts that aren't released."""
        return len(self._attempts)

    @property
    def known_sequences(self) -> int:
        """Sequences that aren't released."""
        return len(self._sequences)

    @property
    def open_sequences(self) -> int:
        """Sequences that haven't finished."""
        return sum(sequence.phase is Phase.OPEN for sequence in self._sequences.values())

    @property
    def held_tokens(self) -> int:
        """Tokens that wait for text that is held back."""
        return sum(sequence.received - sequence.tokens_sent for sequence in list(self._sequences.values()))

    def attempts(self) -> Iterator[tuple[int, list[Sequence]]]:
        """The attempts that aren't released, with their sequences, oldest first."""
        for attempt_id, numbers in self._attempts.items():
            yield attempt_id, [self._sequences[number] for number in numbers]

    def _misplaced(self, number: int, token_offset: int) -> ProtocolError:
        sequence = self._sequences.get(number)
        if sequence is None:
            return ProtocolError(f"sequence {number} has not begun, or is released")
        return ProtocolError(f"sequence {number}: a row at token {token_offset} after {sequence.received} tokens")
