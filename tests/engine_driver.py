"""The smallest scheduler that can drive an engine: places in a batch, chunked prefill, blocks in odd order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from services.scheduler.engine.api import Engine, Failed, Sampled, SamplingSpec, SequenceKey, Slice, Speculated

_UNOPENED = SequenceKey(-1)


@dataclass
class Job:
    """One sequence to be run: what it starts from, and what has come out so far."""

    prompt: Sequence[int]
    spec: SamplingSpec
    max_tokens: int
    stop_ids: frozenset[int] = frozenset()
    suppress_below: int = 0
    key: SequenceKey = _UNOPENED
    blocks: list[int] = field(default_factory=list)
    computed: int = 0
    answers: list[Sampled] = field(default_factory=list)
    failure: Failed | None = None

    @property
    def tokens(self) -> list[int]:
        return [answer.token_id for answer in self.answers]

    @property
    def ended(self) -> bool:
        tokens = self.tokens
        return (
            self.failure is not None or len(tokens) == self.max_tokens or bool(tokens and tokens[-1] in self.stop_ids)
        )

    def add(self, *answers: Sampled) -> None:
        for answer in answers:
            if not self.ended:
                self.answers.append(answer)

    def next_slice(self, chunk: int) -> Slice:
        ids = [*self.prompt, *self.tokens][self.computed : self.computed + chunk]
        samples = self.computed + len(ids) == len(self.prompt) + len(self.answers)
        suppress = len(self.answers) < self.suppress_below
        return Slice(self.key, ids, self.computed, self.blocks, samples, len(self.answers), suppress)


def run(engine: Engine, jobs: Sequence[Job], *, batch: int = 16, chunk: int = 1 << 30) -> None:
    """Runs all jobs to their end, at most `batch` at once; what ends makes room for the next at the next step."""
    free = list(range(engine.info.total_blocks))[::-1]
    free = free[1::2] + free[::2]  # no sequence's blocks lie side by side
    waiting, running, opened = list(jobs), list[Job](), 0
    while waiting or running:
        while waiting and len(running) < batch:
            job = waiting.pop(0)
            job.key, opened = SequenceKey(opened), opened + 1
            needed = -(-(len(job.prompt) + job.max_tokens) // engine.info.block_size)
            job.blocks = [free.pop() for _ in range(needed)]
            engine.open(job.key, job.spec, job.prompt, ())
            running.append(job)
        _step(engine, running, chunk)
        for job in [job for job in running if job.ended]:
            running.remove(job)
            engine.close(job.key)
            free += job.blocks


def _step(engine: Engine, running: Sequence[Job], chunk: int) -> None:
    slices = [job.next_slice(chunk) for job in running]
    by_key = {job.key: job for job in running}
    for answer in engine.step(slices):
        if isinstance(answer, Failed):
            by_key[answer.key].failure = answer
        elif isinstance(answer, Speculated):
            by_key[answer.key].add(*answer.tokens)
            by_key[answer.key].computed += len(answer.tokens)
        else:
            by_key[answer.key].add(answer)
    for job, s in zip(running, slices, strict=True):
        job.computed += len(s.token_ids)
