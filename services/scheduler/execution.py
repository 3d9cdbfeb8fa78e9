"""Runs planned steps on an engine. A failure that can be blamed on one sequence ends that one and no other."""

from __future__ import annotations

from collections.abc import Iterable

from services.runtime.log import get_logger
from services.scheduler.batch import Opening, Plan
from services.scheduler.ending import stops_at
from services.scheduler.engine.api import (
    Answer,
    Engine,
    Failed,
    Sampled,
    SequenceKey,
    Slice,
    Speculated,
)
from services.scheduler.engine.blame import blamed

_log = get_logger("scheduler")


class Execution:
    """The engine thread's side of the step loop; every method runs there and raises nothing.

    A step may have been planned before the outcome of the last one was known. What it lacks is filled in here: the id
    that a decode computes, which is the one drawn last for it, and how far a draft has brought the sequence. A slice of
    a sequence that has ended meanwhile, by a stop or a failure, is left out.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._vocab_size = engine.info.vocab_size
        self._open: dict[SequenceKey, Opening] = {}
        self._drawn: dict[SequenceKey, int] = {}
        self._speculated: dict[SequenceKey, int] = {}  # where those go on whose last step brought more than a token

    def run(self, plan: Plan) -> list[Answer]:
        """Tells the engine who left and who came, then steps."""
        for key in plan.closes:
            self._close(key)
        refused = [failed for opening in plan.opens if (failed := self._take_up(opening)) is not None]
        rows = self._completed(plan.slices)
        answers = [*refused, *self._step(rows)]
        self._note(answers, rows)
        return answers

    def _completed(self, slices: Iterable[Slice]) -> list[Slice]:
        """Those that can be computed, with their ids; runs once per sequence and step."""
        rows, opened, drawn, speculated = [], self._open, self._drawn, self._speculated
        vocab_size = self._vocab_size
        for part in slices:
            opening = opened.get(part.key)
            if opening is None:
                continue
            if not part.token_ids:
                token_id = drawn.get(part.key, -1)
                if not 0 <= token_id < vocab_size:
                    continue
                if speculated and (behind := speculated.get(part.key, 0) - part.start) > 0:
                    part.start += behind
                    part.output_position += behind
                if token_id in opening.stop_ids and stops_at(opening, token_id, part.output_position):
                    continue
                part.token_ids = (token_id,)
            rows.append(part)
        return rows

    def _note(self, answers: Iterable[Answer], rows: Iterable[Slice]) -> None:
        brought: dict[SequenceKey, int] = {}
        for answer in answers:
            if isinstance(answer, Sampled):
                self._drawn[answer.key] = answer.token_id
            elif isinstance(answer, Failed):
                self._open.pop(answer.key, None)
            elif isinstance(answer, Speculated) and answer.tokens:
                self._drawn[answer.key] = answer.tokens[-1].token_id
                brought[answer.key] = 1 + len(answer.tokens)
        if brought:
            self._speculated |= {part.key: part.start + brought[part.key] for part in rows if part.key in brought}

    def _step(self, slices: list[Slice]) -> list[Answer]:
        if not slices:
            return []
        try:
            return self._engine.step(slices)
        except Exception as error:  # noqa: BLE001  # the engine's edge: whatever it is, the process goes on
            if len(slices) == 1:
                return [blamed(slices[0].key, error)]
            _log.exception("a step failed; its sequences are run one by one", sequences=len(slices))
        # Running a slice again is harmless: nothing was drawn yet, and it writes the same KV to the same places.
        return [answer for part in slices for answer in self._step([part])]

    def _take_up(self, opening: Opening) -> Failed | None:
        try:
            self._engine.open(opening.key, opening.spec, opening.prompt_ids, opening.output_ids)
        except Exception as error:  # noqa: BLE001  # likewise
            return blamed(opening.key, error)
        self._open[opening.key] = opening
        return None

    def _close(self, key: SequenceKey) -> None:
        self._open.pop(key, None)
        self._drawn.pop(key, None)
        self._speculated.pop(key, None)
        try:
            self._engine.close(key)
        except Exception:  # noqa: BLE001  # likewise; it may never have been opened
            _log.exception("the engine could not close a sequence", key=key)
