"""The life of a process: open the ports, serve, drain within a bound, close, stop.

A service gives `run` something that makes its App. The order of the end is fixed: `drain` (bounded) while everything
still runs; then `serve` is cancelled; then `close` ends what is left with an event; then the ports let open calls
flush for a moment and close, the public one first.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Sequence
from contextlib import AsyncExitStack
from types import FrameType
from typing import Any, NoReturn, TypeVar

import uvloop

from services.runtime import __version__, log, metrics_server
from services.runtime.app import App, Ports, Runtime
from services.runtime.config import ConfigError, ProcessConfig, load
from services.runtime.heap import settle
from services.runtime.parent import die_with_parent
from services.runtime.phase import Phase, PhaseEvent
from services.runtime.server import GrpcServer, PortUnavailable, reason_of

__all__ = ["EXIT_BAD_CONFIG", "EXIT_CLEAN", "EXIT_CRASH", "App", "Ports", "Runtime", "main", "run", "run_async"]

EXIT_CLEAN, EXIT_CRASH, EXIT_BAD_CONFIG = 0, 1, 2

CLOSE_TIMEOUT_S = 5.0  # of App.close
FLUSH_TIMEOUT_S = 2.0  # for calls whose last event was just written
LAG_INTERVAL_S = 0.1
STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)

MakeApp = Callable[[Runtime], App]
C = TypeVar("C", bound=ProcessConfig)


def main(name: str, cls: type[C], make_app: Callable[[Runtime, C], App], argv: Sequence[str] | None = None) -> int:
    """A service's whole `__main__`: reads its configuration, then runs it; returns the exit code."""
    try:
        config = load(cls, prog=name, argv=sys.argv[1:] if argv is None else argv)
    except ConfigError as error:
        sys.stderr.write(f"{name}: {error}\n")
        return EXIT_BAD_CONFIG
    return run(name, config, lambda runtime: make_app(runtime, config))


def run(name: str, config: ProcessConfig, make_app: MakeApp) -> int:
    """Runs a service until SIGTERM, SIGINT or a drain request, and returns its exit code.

    0 is a clean end, 1 a crash or a taken port, 2 a bad configuration. The first signal drains within
    `drain_timeout_s`, a second one stops at once.
    """
    log.configure(form=config.log_format, level=config.log_level)
    if config.die_with_parent:
        die_with_parent()
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_run_with_signals(name, config, make_app))
    except SystemExit as early:
        return EXIT_CLEAN if early.code is None else int(early.code)


async def run_async(
    name: str,
    config: ProcessConfig,
    make_app: MakeApp,
    *,
    stop: asyncio.Event,
    stop_now: asyncio.Event | None = None,
    on_ports: Callable[[Ports], object] | None = None,
) -> int:
    """The same inside a running loop, without signal handlers and with logs as they are.

    `stop` is the first signal, `stop_now` the second; `on_ports` is told the bound ports once all are open.
    """
    runtime = Runtime(name, config)
    code = EXIT_CLEAN
    try:
        await _run(runtime, make_app, stop, stop_now or asyncio.Event(), on_ports)
    except Exception as error:  # noqa: BLE001  # the process's edge
        code = _exit_code_of(runtime, error)
    runtime.log.info("stopped", exit_code=code)
    return code


async def _run(
    runtime: Runtime,
    make_app: MakeApp,
    stop: asyncio.Event,
    stop_now: asyncio.Event,
    on_ports: Callable[[Ports], object] | None,
) -> None:
    async with AsyncExitStack() as stack:
        stack.callback(runtime.advance, PhaseEvent.STOP)
        metrics_port = _open_metrics(runtime, stack)
        _open_tracing(runtime, stack)
        app = make_app(runtime)
        ports = await _open_ports(runtime, app, metrics_port, stack)
        runtime.advance(PhaseEvent.STARTED)
        runtime.log.info("started", name=runtime.name, version=__version__, pid=os.getpid(), host=runtime.config.host,
                         port=ports.public, admin_port=ports.admin, metrics_port=ports.metrics)  # fmt: skip
        if on_ports is not None:
            on_ports(ports)
        await _live(runtime, app, stop, stop_now)


def _open_metrics(runtime: Runtime, stack: AsyncExitStack) -> int:
    config = runtime.config
    try:
        port, close = metrics_server.serve(runtime.registry, host=config.host, port=config.metrics_port)
    except OSError as error:
        where = f"{config.host}:{config.metrics_port}"
        raise PortUnavailable(f"cannot listen on {where} for {runtime.name} (metrics): {reason_of(error)}") from error
    stack.push_async_callback(asyncio.to_thread, close)
    return port


def _open_tracing(runtime: Runtime, stack: AsyncExitStack) -> None:
    """Where spans are sent nowhere, what would make them is not even loaded."""
    config = runtime.config
    if not config.tracing_endpoint:
        return
    try:
        from services.runtime.otel import OtelTracer
    except ImportError as error:
        why = f"tracing_endpoint needs OpenTelemetry (pip install 'tailrace[tracing]'): {error}"
        raise ConfigError(why) from error
    runtime.tracer = tracer = OtelTracer(
        endpoint=config.tracing_endpoint,
        sample_ratio=config.tracing_sample_ratio,
        resource={
            "service.name": config.tracing_service_name or f"tailrace-{runtime.service}",
            "service.version": __version__,
            "service.instance.id": f"{runtime.name}-{runtime.epoch:016x}",
        },
        clock=runtime.clock,
        log=runtime.log,
        count=lambda outcome, spans: runtime.metrics.spans_total.labels(outcome).inc(spans),
    )
    stack.push_async_callback(tracer.close)


async def _open_ports(runtime: Runtime, app: App, metrics_port: int, stack: AsyncExitStack) -> Ports:
    """Opens the two gRPC ports; `stack` will close the app, then the public one, then the operators'."""
    config = runtime.config
    admin = GrpcServer(host=config.host, port=config.admin_port, name=f"{runtime.name} (admin)")
    public = GrpcServer(
        host=config.host, port=config.port, name=runtime.name, max_concurrent_rpcs=config.max_concurrent_rpcs
    )
    stack.push_async_callback(admin.stop, 0)
    stack.push_async_callback(public.stop, FLUSH_TIMEOUT_S)
    stack.push_async_callback(_close, runtime, app)
    admin_port = await admin.start(app.add_to_admin(admin.server))
    admin.health.set_all(True)  # on this port health means alive, on the public one ready
    public_port = await public.start(app.add_to(public.server))
    runtime.attach(public.health)
    return Ports(public=public_port, admin=admin_port, metrics=metrics_port)


async def _live(runtime: Runtime, app: App, stop: asyncio.Event, stop_now: asyncio.Event) -> None:
    """Serves until the end is asked for, then drains; a crash of `serve` cancels either and is raised in a group."""
    async with asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(_serve(runtime, app), name="serve")
        watching = tasks.create_task(_watch_lag(runtime), name="event loop lag")
        await _first_of(stop.wait(), runtime.wait_drain_requested())
        await _drain(runtime, app, stop_now)
        serving.cancel()
        watching.cancel()


async def _serve(runtime: Runtime, app: App) -> None:
    await app.serve()
    if runtime.phase is Phase.SERVING:
        raise RuntimeError("App.serve returned; it must run until it is cancelled")


async def _drain(runtime: Runtime, app: App, stop_now: asyncio.Event) -> None:
    runtime.advance(PhaseEvent.DRAIN)
    bound_s = runtime.drain_timeout_s
    runtime.log.info("draining", open_requests=app.open_requests(), timeout_s=bound_s)
    await _first_of(app.drain(), stop_now.wait(), timeout_s=bound_s)
    left = app.open_requests()
    if left:
        runtime.log.warning("stopping with open requests", open_requests=left, told_twice=stop_now.is_set())


async def _close(runtime: Runtime, app: App) -> None:
    """Closes the app within a bound; what it raises is logged, for it must not hide why the process ends."""
    try:
        async with asyncio.timeout(CLOSE_TIMEOUT_S):
            await app.close()
    except Exception:
        runtime.log.exception("could not close cleanly")


async def _watch_lag(runtime: Runtime) -> None:
    observe, now = runtime.metrics.event_loop_lag_seconds.observe, runtime.clock.now
    while True:
        due = now() + LAG_INTERVAL_S
        await asyncio.sleep(LAG_INTERVAL_S)
        observe(max(0.0, now() - due))


async def _first_of(*awaitables: Coroutine[Any, Any, object], timeout_s: float | None = None) -> None:
    """Returns when the first one ends (and raises what it raised) or the time is over; the others are cancelled."""
    tasks = [asyncio.create_task(awaitable) for awaitable in awaitables]
    try:
        done, _ = await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in done:
        task.result()


def _exit_code_of(runtime: Runtime, error: Exception) -> int:
    """Logs why the process ends, in one line where the operator can mend it, with a traceback where we must."""
    cause: BaseException = error
    while isinstance(cause, BaseExceptionGroup) and len(cause.exceptions) == 1:
        cause = cause.exceptions[0]
    if isinstance(cause, ConfigError):
        runtime.log.error("bad configuration", why=str(cause))
        return EXIT_BAD_CONFIG
    if isinstance(cause, PortUnavailable):
        runtime.log.error("cannot start", why=str(cause))
    else:
        runtime.log.error("crashed", exc=error)
    return EXIT_CRASH


async def _run_with_signals(name: str, config: ProcessConfig, make_app: MakeApp) -> int:
    stop, stop_now = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        if not stop.is_set():
            _end_for_certain(config)
        (stop_now if stop.is_set() else stop).set()

    loop = asyncio.get_running_loop()
    for number in STOP_SIGNALS:
        loop.add_signal_handler(number, on_signal)
    return await run_async(
        name, config, _interruptible(make_app), stop=stop, stop_now=stop_now, on_ports=lambda _: settle()
    )


def _interruptible(make_app: MakeApp) -> MakeApp:
    """The same, but a signal ends the process at once: loading a model blocks the loop, and nothing is open yet."""

    def make(runtime: Runtime) -> App:
        previous = {number: signal.signal(number, _exit_at_once) for number in STOP_SIGNALS}
        try:
            return make_app(runtime)
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    return make


def _exit_at_once(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(EXIT_CLEAN)


def _end_for_certain(config: ProcessConfig) -> None:
    """A last resort against a blocked loop or a close that hangs: the process ends a little after its bound."""
    bound_s = config.drain_timeout_s + CLOSE_TIMEOUT_S + 2 * FLUSH_TIMEOUT_S

    def end() -> None:
        log.get_logger("runtime").error("did not stop in time", waited_s=bound_s)
        os._exit(EXIT_CRASH)

    timer = threading.Timer(bound_s, end)
    timer.daemon = True
    timer.start()
