"""Where the admin ports are: as somebody says, those of a `tailrace up` that runs here, or the defaults."""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from cli.loop import FLOW
from cli.stack import LOOPBACK, Service

VARIABLE = "TAILRACE_ADMIN"
DEFAULTS = tuple((name, f"{LOOPBACK}:{port}") for name, port in zip(FLOW, range(7100, 7104), strict=True))

Named = tuple[str, str]
"""What a process is called, and its admin address."""


class BadAddresses(ValueError):
    """Addresses that can't be used; the message is for whoever wrote them."""


def add_admin_flag(parser: argparse.ArgumentParser) -> None:
    """Adds `--admin`."""
    parser.add_argument(
        "--admin",
        default=os.environ.get(VARIABLE, ""),
        metavar="[NAME=]HOST:PORT,...",
        help=f"the admin ports (default: {VARIABLE}, or those of the `tailrace up` that runs here, or 7100 to 7103)",
    )


def admin_addresses(given: str) -> Sequence[Named]:
    """The addresses that were given, or those found. Raises BadAddresses."""
    if given:
        return [_parse(text.strip()) for text in given.split(",")]
    running = list(_running())
    if len(running) > 1:
        stacks = "; ".join(",".join(f"{name}={address}" for name, address in stack) for stack in running)
        raise BadAddresses(f"several stacks run here, name one with --admin: {stacks}")
    return running[0] if running else DEFAULTS


@contextmanager
def published(services: Sequence[Service]) -> Iterator[None]:
    """Meanwhile, the commands that look into the loop find these services."""
    path = _directory() / f"{os.getpid()}.json"
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.write_text(json.dumps([(service.name, service.admin_address) for service in services]))
    except OSError:
        # A convenience: without it --admin has to say where they are.
        yield
        return
    try:
        yield
    finally:
        path.unlink(missing_ok=True)


def _running() -> Iterator[list[Named]]:
    """The stacks whose `tailrace up` still runs."""
    for path in sorted(_directory().glob("*.json")):
        with suppress(OSError, ValueError):
            if path.stat().st_uid == os.getuid() and _is_running(int(path.stem)):
                yield [(str(name), str(address)) for name, address in json.loads(path.read_text())]


def _directory() -> Path:
    base = os.environ.get("XDG_RUNTIME_DIR")
    return Path(base, "tailrace") if base else Path(tempfile.gettempdir(), f"tailrace-{os.getuid()}")


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _parse(text: str) -> Named:
    name, _, address = text.rpartition("=")
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise BadAddresses(f"--admin: {text!r} is not host:port, or name=host:port")
    return name, address
