"""What the scheduler itself costs per sequence and step: everything but the engine, up to the serialised message.

    PYTHONPATH=.:build/gen python bench/scheduler_step.py

Runs the real core, publisher and wire over the fake engine in one thread, with no transport. `between` is another run,
of the real step loop and engine thread: how long the engine waits from one step's end to the next one's start (median
µs, whatever the sequences), when a step takes 5 ms that leave the cores alone, as a GPU's do.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

from services.runtime.clock import SystemClock
from services.runtime.metrics import SchedulerMetrics, new_registry
from services.scheduler import wire
from services.scheduler.admission import Limits
from services.scheduler.call import Rows
from services.scheduler.core import SchedulerCore
from services.scheduler.engine.api import Answer, SamplingSpec, Slice
from services.scheduler.engine.fake import FakeConfig, FakeEngine
from services.scheduler.engine_thread import EngineThread
from services.scheduler.execution import Execution
from services.scheduler.loop import StepLoop
from services.scheduler.publisher import Publisher
from services.scheduler.submission import ChoiceStart, Route, Submission

PARTS = ("plan", "engine", "apply", "mark", "take", "message")
OWN_PARTS = tuple(part for part in PARTS if part != "engine")
ROUTE = Route("bench", 1)
DEVICE_S = 0.005
WARM_UP_STEPS = 5

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


class DeviceEngine(FakeEngine):
    """Steps that take a device's time, and how long it stood idle before each, seconds."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.idle: list[float] = []
        self._ended_at = time.perf_counter()

    def step(self, slices: Sequence[Slice]) -> list[Answer]:
        """As the fake engine, DEVICE_S later."""
        self.idle.append(time.perf_counter() - self._ended_at)
        answers = super().step(slices)
        time.sleep(DEVICE_S)
        self._ended_at = time.perf_counter()
        return answers


async def measure_between(sequences: int, steps: int) -> float:
    """Median seconds between two steps of `sequences` decoding ones."""
    engine, thread = DeviceEngine(_config(sequences, steps)), EngineThread()
    core = SchedulerCore(engine.info, _limits(sequences))
    loop = StepLoop(engine, thread, core, Publisher(), SystemClock(), SchedulerMetrics(new_registry()))
    for number in range(sequences):
        loop.submit(_submission(number, max_tokens=steps))
    changed = asyncio.Event()
    with loop.watching(changed.set):
        running = asyncio.create_task(loop.run())
        while core.open_sequences:
            await changed.wait()
            changed.clear()
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
    await thread.close()
    return statistics.median(engine.idle[WARM_UP_STEPS:])


def measure(sequences: int, steps: int) -> Stopwatch:
    """Steps `sequences` decoding sequences `steps` times, after their prefill."""
    engine, limits = FakeEngine(_config(sequences, steps)), _limits(sequences)
    core, publisher, execution = SchedulerCore(engine.info, limits), Publisher(), Execution(engine)
    call = publisher.open(ROUTE, 1)
    for number in range(sequences):
        publisher.perform(core.submit(_submission(number), 0.0))
    watch = Stopwatch()
    for step in range(-2, steps):
        if step == 0:
            watch = Stopwatch()
        plan = watch.time("plan", core.plan)
        answers = watch.time("engine", execution.run, plan)
        effects = watch.time("apply", core.apply, plan, answers, 0.0)
        watch.time("mark", publisher.perform, effects)
        rows = watch.time("take", call.take)
        assert rows is not None
        watch.time("message", _message, rows)
    return watch


def _config(sequences: int, steps: int) -> FakeConfig:
    return FakeConfig(total_blocks=sequences * (steps // 16 + 4))


def _limits(sequences: int) -> Limits:
    return Limits(max_running=sequences, max_step_tokens=max(512, 8 * sequences))


def _submission(number: int, max_tokens: int | None = None) -> Submission:
    return Submission(
        attempt_id=number + 1,
        route=ROUTE,
        prompt_ids=(1, 2, 3, 4 + number),
        choices=(ChoiceStart(0),),
        sampling=SamplingSpec(seed=number),
        ignore_eos=True,
        max_tokens=max_tokens,
    )


def _message(rows: Rows) -> bytes:
    return wire.tokens_to_wire(rows).SerializeToString()


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--sequences", type=int, nargs="*", default=[32, 256, 1024])
    parser.add_argument("--steps", type=int, default=400)
    arguments = parser.parse_args()
    print("µs per sequence and step")
    print("sequences  " + "".join(f"{part:>9}" for part in PARTS) + "      own   ms per step   between")
    for sequences in arguments.sequences:
        watch = measure(sequences, arguments.steps)
        per = {part: watch.seconds[part] / arguments.steps / sequences * 1e6 for part in PARTS}
        own = sum(per[part] for part in OWN_PARTS)
        between = asyncio.run(measure_between(sequences, min(arguments.steps, 200))) * 1e6
        columns = "".join(f"{per[part]:9.2f}" for part in PARTS)
        print(f"{sequences:9}  {columns}{own:9.2f}{own * sequences / 1e3:14.3f}{between:10.0f}")


if __name__ == "__main__":
    main()
