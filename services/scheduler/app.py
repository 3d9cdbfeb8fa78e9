"""The scheduler's process: the only place where its objects meet."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import grpc.aio

from services.protocol.inspection import add_admin_services
from services.protocol.sender import Wakeup
from services.runtime.app import Runtime
from services.runtime.errors import Unavailable
from services.runtime.heap import settle
from services.runtime.metrics import SchedulerMetrics
from services.scheduler import engines
from services.scheduler.config import SchedulerConfig
from services.scheduler.constraint.compiler import ConstraintCompiler
from services.scheduler.constraint.workshop import Compile, Workshop
from services.scheduler.core import SchedulerCore
from services.scheduler.engine.api import EngineInfo
from services.scheduler.engine_thread import EngineThread
from services.scheduler.inference_gateway import InferenceGatewayNames
from services.scheduler.inspection import SchedulerInspection
from services.scheduler.loop import StepLoop
from services.scheduler.publisher import Publisher
from services.scheduler.servicer import SchedulerAdminServicer, SchedulerServicer, Serving
from tailrace.v1 import scheduler_pb2_grpc

SERVICE = "tailrace.v1.SchedulerService"

STALL_CHECK_S = 1.0


class SchedulerApp:
    """A scheduler as `services.runtime.app.App` wants it."""

    def __init__(self, runtime: Runtime, config: SchedulerConfig) -> None:
        self._runtime = runtime
        self._config = config
        self._metrics = SchedulerMetrics(runtime.registry)
        self._thread: EngineThread | None = None
        self._serving: Serving | None = None

    def add_to(self, server: grpc.aio.Server) -> Sequence[str]:
        """The service itself."""
        scheduler_pb2_grpc.add_SchedulerServiceServicer_to_server(SchedulerServicer(self._loaded), server)
        return (SERVICE,)

    def add_to_admin(self, server: grpc.aio.Server) -> Sequence[str]:
        """For operators."""
        inspection = SchedulerInspection(self._runtime, self._metrics, lambda: self._serving)
        admin = SchedulerAdminServicer(self._loaded, self._runtime.request_drain, self.open_requests)
        return add_admin_services(server, inspection, self._runtime, self.open_requests, admin)

    async def serve(self) -> None:
        """Loads the engine, while health already answers, then steps until cancelled."""
        self._runtime.set_ready(False, "loading the model")
        # Loading runs on the thread that later steps: what an engine sets up for its thread must be set up there.
        self._thread = EngineThread()
        loaded = await self._thread.run(engines.load, self._config)
        settle()
        limits = self._config.limits_of(loaded.engine.info)
        core = SchedulerCore(loaded.engine.info, limits)
        runtime = self._runtime
        loop = StepLoop(loaded.engine, self._thread, core, Publisher(), runtime.clock, self._metrics, runtime.tracer)
        workshop = Workshop(self._compiler_of(loaded.engine.info))
        self._serving = Serving(loop, loaded.hello(self._runtime.epoch), workshop)
        if self._config.inference_gateway_names:
            InferenceGatewayNames(loop.load, self._serving.hello.model_id, self._runtime.registry)
        report = {**loaded.report, "max_step_tokens": limits.max_step_tokens}
        runtime.log.info("engine loaded", model=self._serving.hello.model_id, **report)
        self._runtime.set_ready(True)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(loop.run(), name="step loop")
            tasks.create_task(self._watch_stall(loop), name="stall watch")

    def open_requests(self) -> int:
        """Attempts that somebody still needs: not ended, or ended and not released while their route is read."""
        if self._serving is None:
            return 0
        loop = self._serving.loop
        return sum(
            bool(attempt.open_sequences) or loop.publisher.has_call(attempt.owner)
            for attempt in loop.core.attempts.values()
        )

    async def drain(self) -> None:
        """Returns when no attempt is needed any more. New ones are refused meanwhile; routes may still move."""
        if self._serving is None:
            return
        self._serving.loop.drain()
        changed = Wakeup()
        with self._serving.loop.watching(changed.set):
            while self.open_requests():
                await changed.wait()

    async def close(self) -> None:
        """Ends the streams, and with them what is left here: its tokenizers go on with it elsewhere."""
        if self._serving is not None:
            self._serving.loop.close()
            self._serving.workshop.close()
        if self._thread is not None:
            await self._thread.close()

    async def _watch_stall(self, loop: StepLoop) -> None:
        """A step that hangs can't say so itself; whoever routes to us must be told."""
        while True:
            await asyncio.sleep(STALL_CHECK_S)
            if loop.pulse.stalled(self._config.stall_timeout_s, self._runtime.clock.now()):
                self._runtime.set_ready(False, "the step loop stands still")
            else:
                self._runtime.set_ready(True)

    def _compiler_of(self, info: EngineInfo) -> Compile | None:
        if self._config.model is None:
            return None
        return ConstraintCompiler(self._config.model / "tokenizer.json", info.vocab_size, info.eos_token_ids).compile

    def _loaded(self) -> Serving:
        if self._serving is None:
            raise Unavailable("the model is being loaded", reason="LOADING")
        return self._serving
