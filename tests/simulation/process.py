"""One simulated process: a service from its configuration to its exit code, or a caller."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from services.runtime.config import ProcessConfig
from services.runtime.process import App, Runtime, run_async
from tests.simulation.loop import ProcessLoop, new_loop
from tests.simulation.network import Network
from tests.simulation.world import World

MakeApp = Callable[[Runtime, Any], App]


class Process:
    """Something that runs on a loop of its own under a name, which is its host's too.

    `step_s` is how long a step of its engine takes, if it has one.
    """

    def __init__(self, world: World, network: Network, name: str) -> None:
        self.world = world
        self.network = network
        self.name = name
        self.step_s: Callable[[], float] = lambda: 0.0
        self.loop = new_loop(world, name)
        self.loop.alive = False
        self.graves: list[ProcessLoop] = []

    @staticmethod
    def running() -> Process:
        """The process whose code runs now."""
        loop = asyncio.get_running_loop()
        assert isinstance(loop, ProcessLoop)
        process = loop.owner
        assert isinstance(process, Process)
        return process

    @property
    def alive(self) -> bool:
        """Whether it runs, or is paused."""
        return self.loop.alive

    @property
    def paused(self) -> bool:
        """Whether it is stopped, with everything as it was."""
        return self.loop.alive and self.loop.paused

    def start(self, main: Callable[[], Coroutine[Any, Any, object]]) -> None:
        """A new incarnation."""
        assert not self.alive
        self.graves.append(self.loop)
        self.network.dark.discard(self.name)
        self.loop = new_loop(self.world, self.name, origin=round(self.world.random.uniform(0, 1e6)))
        self.loop.owner = self
        self.loop.deliver(self._begin, main)

    def kill(self, *, silently: bool = False) -> None:
        """SIGKILL; `silently`: its machine goes with it, so that nobody is told."""
        if not self.alive:
            return
        self.loop.kill()
        if silently:
            self.network.dark.add(self.name)
        self.network.died(self.loop, silently=silently)

    def pause(self) -> None:
        """SIGSTOP."""
        if self.alive and not self.loop.paused:
            self.loop.pause()

    def resume(self) -> None:
        """SIGCONT."""
        if self.paused:
            self.loop.resume()

    def lost_errors(self) -> list[str]:
        """What tasks died of without anybody asking. Of a dead incarnation nobody knows who would have asked."""
        return self.loop.lost_errors() if self.alive else []

    def bury(self) -> None:
        """After the run."""
        for loop in (*self.graves, self.loop):
            loop.bury()

    def _begin(self, main: Callable[[], Coroutine[Any, Any, object]]) -> None:
        task = self.loop.create_task(main(), name="main")
        task.add_done_callback(partial(self._exited, self.loop))

    def _exited(self, loop: ProcessLoop, task: asyncio.Task[object]) -> None:
        if loop is not self.loop or self.world.over:
            return
        if not task.cancelled() and (error := task.exception()) is not None:
            self.world.violated(f"{self.name} crashed: {error!r}")
        self.loop.kill()
        self.network.died(self.loop, silently=False)


class Service(Process):
    """A service, which can be started again, each time as a new incarnation with nothing of the old one."""

    def __init__(self, world: World, network: Network, config: ProcessConfig, make_app: MakeApp) -> None:
        super().__init__(world, network, config.name)
        self.app: Any = None
        self.runtime: Runtime | None = None
        self._config = config
        self._make_app = make_app
        self._stop: asyncio.Event | None = None

    @property
    def address(self) -> str:
        """Where others find it."""
        return f"{self._config.host}:{self._config.port}"

    def launch(self, model: Path | None = None) -> None:
        """Starts it, with another model than its own if one is given."""
        config = self._config
        if model is not None:
            config = replace(config, model=model)  # type: ignore[call-arg]  # of a service that has one
        self.start(partial(self._run, config))

    def drain(self) -> None:
        """SIGTERM."""
        if self.alive:
            self.loop.deliver(self._drain)

    async def _run(self, config: ProcessConfig) -> None:
        self._stop = asyncio.Event()
        code = await run_async(self.name, config, partial(self._made, config), stop=self._stop)
        if code:
            self.world.violated(f"{self.name} ended with exit code {code}")

    def _made(self, config: ProcessConfig, runtime: Runtime) -> App:
        self.runtime = runtime
        self.app = self._make_app(runtime, config)
        return self.app  # type: ignore[no-any-return]  # whichever service it is

    def _drain(self) -> None:
        if self._stop is not None:
            self._stop.set()
