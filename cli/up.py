"""`tailrace up`: the whole system on this machine, in the foreground, until Ctrl-C."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from cli.admin_addresses import published
from cli.demo import how_to_call, show_answer
from cli.exit_code import ExitCode
from cli.model_source import NoModel, model_directory
from cli.server_address import in_plain_words
from cli.stack import Plan, PortTaken, Service, services_of
from cli.supervisor import Supervisor
from cli.terminal import Terminal
from tailrace.client import Client, ClientError, Model

STOP_MARGIN_S = 10.0
STATUS_INTERVAL_S = 0.1


def main(argv: Sequence[str]) -> int:
    """Runs until it is stopped; exit code 0 after a clean stop, 1 when a service could not be kept running."""
    options = _parser().parse_args(argv)
    try:
        plan = _plan(options)
        services = services_of(plan)
    except (NoModel, PortTaken) as error:
        print(f"tailrace up: {error}", file=sys.stderr)
        return ExitCode.FAILED
    return asyncio.run(_up(plan, services, demo=options.demo))


async def _up(plan: Plan, services: Sequence[Service], *, demo: bool) -> int:
    terminal = Terminal(sys.stdout)
    supervisor = Supervisor(services, terminal, stop_timeout_s=plan.drain_timeout_s + STOP_MARGIN_S)
    _stop_on_signals(supervisor, terminal)
    with published(services):
        return await _run(supervisor, terminal, plan, services, demo=demo)


async def _run(
    supervisor: Supervisor, terminal: Terminal, plan: Plan, services: Sequence[Service], *, demo: bool
) -> int:
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(supervisor.run())
        if await _wait_ready(supervisor, terminal):
            await _welcome(terminal, plan, services, demo=demo)
        await running
    return ExitCode.FAILED if supervisor.lost else ExitCode.OK


async def _wait_ready(supervisor: Supervisor, terminal: Terminal) -> bool:
    started = time.monotonic()
    waiting = asyncio.create_task(supervisor.wait_all_ready())
    while not waiting.done():
        terminal.status(f"starting  {supervisor.progress()}  {time.monotonic() - started:.1f} s")
        await asyncio.wait((waiting,), timeout=STATUS_INTERVAL_S)
    terminal.status("")
    if await waiting:
        terminal.say(f"ready after {time.monotonic() - started:.1f} s")
    return await waiting


async def _welcome(terminal: Terminal, plan: Plan, services: Sequence[Service], *, demo: bool) -> None:
    """Says where everything is; a failing demo is told, and no reason to stop."""
    address = f"127.0.0.1:{plan.grpc_port}"
    try:
        async with Client(address) as client:
            model = (await client.list_models())[0]
        terminal.plain(_where(plan, services, model))
        if demo:
            await show_answer(terminal, address)
            terminal.plain(how_to_call(http_port=plan.http_port, grpc_port=plan.grpc_port, model=model.model_id))
    except ClientError as error:
        terminal.warn(in_plain_words(error, address))


def _where(plan: Plan, services: Sequence[Service], model: Model) -> str:
    metrics = "  ".join(f"{service.name} :{service.metrics_port}" for service in services)
    return (
        f"  model        {model.model_id}, up to {model.context_length:,} tokens a sequence\n"
        f"  OpenAI API   http://{plan.host}:{plan.http_port}/v1\n"
        f"  gRPC         {plan.host}:{plan.grpc_port}\n"
        f"  /metrics     {metrics}"
    )


def _stop_on_signals(supervisor: Supervisor, terminal: Terminal) -> None:
    def stop() -> None:
        terminal.say("\nstopping; open requests may finish. Ctrl-C again stops at once")
        supervisor.stop()

    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        asyncio.get_running_loop().add_signal_handler(number, stop)


def _plan(options: argparse.Namespace) -> Plan:
    return Plan(
        model=model_directory(options.model),
        fake_engine=options.fake_engine,
        host=options.host,
        http_port=options.http_port,
        grpc_port=options.grpc_port,
        drain_timeout_s=options.drain_timeout_s,
        log_level=options.log_level,
        tracing_endpoint=options.tracing_endpoint,
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tailrace up",
        description="Starts gateway, tokenizer, detokenizer and scheduler here; Ctrl-C stops them as one.",
    )
    parser.add_argument("--model", type=Path, metavar="DIR|GGUF", help="default: the embedded SmolLM2-135M-Instruct")
    parser.add_argument("--fake-engine", action="store_true", help="made-up tokens, not a model's; needs no torch")
    parser.add_argument("--host", default="127.0.0.1", help="address of the public ports (default: 127.0.0.1)")
    parser.add_argument("--http-port", type=int, default=8000, metavar="PORT", help="OpenAI API (default: 8000)")
    parser.add_argument("--grpc-port", type=int, default=7000, metavar="PORT", help="gRPC API (default: 7000)")
    parser.add_argument("--demo", action="store_true", help="show one answer, and how to ask for the next")
    parser.add_argument(
        "--drain-timeout-s", type=float, default=30.0, metavar="SECONDS",
        help="how long open requests may take to finish at the end (default: 30)",
    )  # fmt: skip
    parser.add_argument(
        "--tracing-endpoint", default="", metavar="URL",
        help="where spans are sent, OTLP over gRPC, as http://127.0.0.1:4317 (default: nowhere)",
    )  # fmt: skip
    parser.add_argument("--log-level", choices=("debug", "info", "warning", "error"), default="info")
    return parser
