"""What the scheduler itself costs per sequence and step: everything but the engine, up to the serialised message.

    PYTHONPATH=.:build/gen python bench/scheduler_step.py

Runs the real core, publisher and wire over the fake engine in one thread, with no transport.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

from services.scheduler import wire
from services.scheduler.admission import Limits
from services.scheduler.call import Rows
from services.scheduler.core import SchedulerCore
from services.scheduler.engine.api import SamplingSpec
from services.scheduler.engine.fake import FakeConfig, FakeEngine
from services.scheduler.execution import execute
from services.scheduler.publisher import Publisher
from services.scheduler.submission import ChoiceStart, Route, Submission

PARTS = ("plan", "engine", "apply", "mark", "take", "message")
OWN_PARTS = tuple(part for part in PARTS if part != "engine")
ROUTE = Route("bench", 1)

P = ParamSpec("P")
T = TypeVar("T")


@dataclass
class Stopwatch:
    """Seconds spent per part."""

    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))

    def time(self, part: str, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Runs `work` and counts its time."""
        started_at = time.thread_time()
        result = work(*args, **kwargs)
        self.seconds[part] += time.thread_time() - started_at
        return result


def measure(sequences: int, steps: int) -> Stopwatch:
    """Steps `sequences` decoding sequences `steps` times, after their prefill."""
    limits = Limits(max_running=sequences, max_step_tokens=max(512, 8 * sequences))
    engine = FakeEngine(FakeConfig(total_blocks=sequences * (steps // 16 + 4)))
    core, publisher = SchedulerCore(engine.info, limits), Publisher()
    call = publisher.open(ROUTE, 1)
    for number in range(sequences):
        submission = Submission(
            attempt_id=number + 1,
            route=ROUTE,
            prompt_ids=(1, 2, 3, 4 + number),
            choices=(ChoiceStart(0),),
            sampling=SamplingSpec(seed=number),
            ignore_eos=True,
        )
        publisher.perform(core.submit(submission, 0.0))
    watch = Stopwatch()
    for step in range(-2, steps):
        if step == 0:
            watch = Stopwatch()
        plan = watch.time("plan", core.plan)
        answers = watch.time("engine", execute, engine, plan)
        effects = watch.time("apply", core.apply, plan, answers, 0.0)
        watch.time("mark", publisher.perform, effects)
        rows = watch.time("take", call.take)
        assert rows is not None
        watch.time("message", _message, rows)
    return watch


def _message(rows: Rows) -> bytes:
    return wire.tokens_to_wire(rows).SerializeToString()


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sequences", type=int, nargs="*", default=[32, 256, 1024])
    parser.add_argument("--steps", type=int, default=400)
    arguments = parser.parse_args()
    print("µs per sequence and step")
    print("sequences  " + "".join(f"{part:>9}" for part in PARTS) + "      own   ms per step")
    for sequences in arguments.sequences:
        watch = measure(sequences, arguments.steps)
        per = {part: watch.seconds[part] / arguments.steps / sequences * 1e6 for part in PARTS}
        own = sum(per[part] for part in OWN_PARTS)
        columns = "".join(f"{per[part]:9.2f}" for part in PARTS)
        print(f"{sequences:9}  {columns}{own:9.2f}{own * sequences / 1e3:14.3f}")


if __name__ == "__main__":
    main()
