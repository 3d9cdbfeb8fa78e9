"""What a run of chaos consists of."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from tests.chaos.callers import Question
from tests.chaos.fault import Kind
from tests.chaos.fleet import SERVICES

EngineName = Literal["fake", "fp32", "int8"]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The requests, and what is done while they are answered. `stop_s`: how long a stopped process may stand still."""

    rounds: int = 10
    streams: int = 200
    max_tokens: int = 800
    pace_ms: float = 50.0
    engine: EngineName = "fake"
    services: Sequence[str] = SERVICES
    kinds: Sequence[Kind] = tuple(Kind)
    stop_s: tuple[float, float] = (0.5, 8.0)
    seed: int = 1

    @property
    def questions(self) -> list[Question]:
        """The same ones in each round."""
        return [Question(number, self.max_tokens) for number in range(self.streams)]

    @property
    def engine_flags(self) -> tuple[str, ...]:
        """The fake engine at a steady pace, or the embedded model with weights of this format."""
        if self.engine == "fake":
            return ("--engine", "fake", "--fake-pace-ms", str(self.pace_ms))
        return ("--weights-format", self.engine)
