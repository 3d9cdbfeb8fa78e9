"""The fake engine with a memory: it notes what is written into every KV slot and knows when a wrong one is read."""

from __future__ import annotations

from collections.abc import Sequence

from services.scheduler.engine.api import Answer, Sampled, SamplingSpec, SequenceKey, Slice, Speculated
from services.scheduler.engine.fake import FakeEngine


class WitnessEngine(FakeEngine):
    """A slot holds a fingerprint of all ids up to its own, so a slot that reads right belongs to the right prefix."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.wrongs: list[str] = []
        self.computed_tokens = 0
        self._ids: dict[SequenceKey, list[int]] = {}
        self._prints: dict[SequenceKey, list[int]] = {}
        self._slots: dict[int, int | None] = {}

    def open(self, key: SequenceKey, spec: SamplingSpec, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> None:
        super().open(key, spec, prompt_ids, output_ids)
        self._ids[key] = [*prompt_ids, *output_ids]
        self._prints[key] = []

    def step(self, slices: Sequence[Slice]) -> list[Answer]:
        for part in slices:
            self._check(part)
            self.computed_tokens += len(part.token_ids)
        answers = super().step(slices)
        parts = {part.key: part for part in slices}
        first = {answer.key: answer for answer in answers if isinstance(answer, Sampled)}
        for answer in answers:
            if isinstance(answer, Speculated):
                self._note_draft(parts[answer.key], answer, [first[answer.key], *answer.tokens[:-1]])
        return answers

    def close(self, key: SequenceKey) -> None:
        super().close(key)
        del self._ids[key], self._prints[key]

    def _note_draft(self, part: Slice, draft: Speculated, right: Sequence[Sampled]) -> None:
        ids, prints, size = self._ids[part.key], self._prints[part.key], self.info.block_size
        if part.start + draft.drafted + 2 > len(part.block_table) * size:
            self.wrongs.append(f"{part.key}: a draft at {part.start} leaves no place for the token behind it")
        for number, position in enumerate(range(part.start + 1, part.start + 1 + draft.drafted)):
            if number < len(draft.tokens):
                ids.append(right[number].token_id)
                prints.append(hash((prints[-1], ids[-1])))
            wrong = number >= len(draft.tokens)
            self._slots[part.block_table[position // size] * size + position % size] = None if wrong else prints[-1]

    def _check(self, part: Slice) -> None:
        ids, prints, size = self._ids[part.key], self._prints[part.key], self.info.block_size
        end = part.start + len(part.token_ids)
        known = len(ids) - part.start
        if ids[part.start : end] != list(part.token_ids[:known]):
            self.wrongs.append(f"{part.key}: other ids at {part.start} than it was opened with")
        ids += part.token_ids[known:]
        for position in range(len(prints), end):
            prints.append(hash((prints[-1] if prints else 0, ids[position])))
        # Whoever gets a block writes its first slot first.
        for position in {*range(0, part.start, size), *range(max(part.start - 1, 0), part.start)}:
            if self._slots.get(part.block_table[position // size] * size + position % size) != prints[position]:
                self.wrongs.append(f"{part.key}: position {position} holds what another one wrote")
        for position in range(part.start, end):
            self._slots[part.block_table[position // size] * size + position % size] = prints[position]
