"""A small fuzzer: mutates inputs that reached something new, for a given time, and keeps whatever broke the target.

Progress is judged by what the target itself says it reached (states, not lines of code), so it needs no instrumented
interpreter. A seed reproduces a run that starts from the same corpus.
"""

from __future__ import annotations

import hashlib
import random
import time
import traceback
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

Target = Callable[[bytes], Iterable[Hashable]]
"""Checks one input and tells the states that it reached. Raises when a promise is broken."""

MAX_INPUT_BYTES = 256
REPORT_EVERY_S = 5.0


@dataclass
class Fuzzer:
    """One run. Inputs are kept in `directory`: corpus/ for those that reached something new, failures/ for the rest."""

    target: Target
    directory: Path
    seed: int
    reached: set[Hashable] = field(default_factory=set)
    corpus: list[bytes] = field(default_factory=list)
    executions: int = 0

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        for name in ("corpus", "failures"):
            (self.directory / name).mkdir(parents=True, exist_ok=True)

    def run(self, seconds: float, report: Callable[[str], None]) -> Path | None:
        """Fuzzes for so long; the input that broke the target, or None. Earlier failures are tried first."""
        start = reported = time.monotonic()
        for data in self._inputs():
            if (failure := self._try(data, report)) is not None:
                return failure
            now = time.monotonic()
            if now - reported >= REPORT_EVERY_S or now - start >= seconds:
                reported = now
                report(self._progress(now - start))
            if now - start >= seconds:
                break
        return None

    def _inputs(self) -> Iterator[bytes]:
        for name in ("failures", "corpus"):
            for path in sorted((self.directory / name).iterdir()):
                yield path.read_bytes()
        while True:
            yield self._mutated()

    def _try(self, data: bytes, report: Callable[[str], None]) -> Path | None:
        self.executions += 1
        try:
            states = set(self.target(data))
        except Exception:  # noqa: BLE001  # whatever breaks the target is what is looked for
            path = self._keep("failures", data)
            report(f"{traceback.format_exc()}\ninput {path}")
            return path
        if not states <= self.reached:
            self.reached |= states
            self.corpus.append(data)
            self._keep("corpus", data)
        return None

    def _keep(self, name: str, data: bytes) -> Path:
        path = self.directory / name / hashlib.sha256(data).hexdigest()[:16]
        path.write_bytes(data)
        return path

    def _mutated(self) -> bytes:
        """A new input, or a kept one with a few places changed, or two of them joined."""
        rng = self._random
        if not self.corpus or rng.random() < 0.1:
            return rng.randbytes(rng.randrange(1, MAX_INPUT_BYTES))
        data = bytearray(rng.choice(self.corpus))
        for _ in range(rng.randrange(1, 6)):
            place = rng.randrange(len(data) + 1)
            match rng.randrange(4):
                case 0:
                    data[place : place + 1] = rng.randbytes(1)
                case 1:
                    data[place:place] = rng.randbytes(rng.randrange(1, 4))
                case 2:
                    del data[place : place + rng.randrange(1, 9)]
                case _:
                    other = rng.choice(self.corpus)
                    data[place:] = other[rng.randrange(len(other) + 1) :]
        return bytes(data[:MAX_INPUT_BYTES])

    def _progress(self, elapsed_s: float) -> str:
        rate = self.executions / max(elapsed_s, 1e-9)
        return (
            f"{elapsed_s:6.0f} s  {self.executions:9,} executions  {rate:7,.0f} /s  "
            f"{len(self.reached):6,} states  corpus {len(self.corpus):,}"
        )
