"""What a caller must get: the undisturbed run's ids from the engine itself, and their text by its definition alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from services.detokenizer.plan import TextPlan
from services.protocol.events import EndOfText, FinishReason, StopMatch, StopToken
from services.scheduler.engine.api import SamplingSpec
from services.scheduler.engine.fake import FakeConfig, FakeEngine, FakeMode
from tests.engine_driver import Job, run
from tests.simulation.model import CONTEXT_LENGTH, eos_id, vocabulary
from tests.simulation.request import Request
from tests.unit.detokenizer.oracle import End, Told, told


@dataclass(frozen=True)
class Expected:
    """One choice of an undisturbed run: what of it has left after any number of its tokens, and how it ends."""

    ids: Sequence[int]
    plan: TextPlan
    end: End

    @cached_property
    def whole(self) -> Told:
        """All of it."""
        return told(vocabulary(), self.plan, self.ids, self.end)

    def broken_off(self, count: int, reason: FinishReason) -> tuple[str, str]:
        """Its text when it ends early after so many tokens: as it was sent so far, and with what was held back."""
        ids = self.ids[:count]
        so_far, flushed = told(vocabulary(), self.plan, ids), told(vocabulary(), self.plan, ids, End(reason))
        return so_far.text, flushed.text


def expected_of(request: Request, seed: int, choice: int, *, echo: bool) -> Expected:
    """The choice's undisturbed run. `seed` is the one that was told in Started."""
    stop_ids = tuple(dict.fromkeys((*(() if request.ignore_eos else (eos_id(),)), *request.stop_token_ids)))
    job = Job(
        prompt=request.prompt_ids,
        spec=SamplingSpec(seed=seed, choice=choice, suppressible_ids=stop_ids if request.min_tokens else ()),
        max_tokens=min(request.max_tokens, CONTEXT_LENGTH - len(request.prompt_ids)),
        stop_ids=frozenset(stop_ids),
        suppress_below=request.min_tokens,
    )
    run(_engine(echo=echo), [job])
    plan = TextPlan(
        stop=request.stop,
        include_stop_in_output=request.include_stop,
        min_tokens=request.min_tokens,
        end_token_ids=frozenset(stop_ids),
    )
    return Expected(job.tokens, plan, _end(job, request))


def stop_of(expected: Expected) -> StopMatch | None:
    """At what it stops, if it does."""
    finish = expected.whole.finish
    assert finish is not None
    return finish[1]


def _end(job: Job, request: Request) -> End:
    last = job.tokens[-1]
    if last not in job.stop_ids:
        return End(FinishReason.LENGTH)
    return End(FinishReason.STOP, StopToken(last) if last in request.stop_token_ids else EndOfText(last))


def _engine(*, echo: bool) -> FakeEngine:
    return FakeEngine(
        FakeConfig(
            vocab_size=len(vocabulary().pieces) - 1,
            context_length=CONTEXT_LENGTH,
            eos_token_ids=(eos_id(),),
            mode=FakeMode.ECHO if echo else FakeMode.HASH,
        )
    )
