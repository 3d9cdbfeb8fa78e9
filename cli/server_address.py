"""Which server a command talks to, and what to say when it doesn't answer."""

from __future__ import annotations

import argparse
import os

from cli.exit_code import ExitCode
from tailrace.client import ClientError, InvalidRequest, Overloaded, StreamCut, Unreachable

VARIABLE = "TAILRACE_SERVER"
DEFAULT = "127.0.0.1:7000"


def add_server_flag(parser: argparse.ArgumentParser) -> None:
    """Adds `--server`; without it the environment decides."""
    parser.add_argument(
        "--server",
        default=os.environ.get(VARIABLE, DEFAULT),
        metavar="HOST:PORT",
        help=f"the server's gRPC address (default: {VARIABLE} or {DEFAULT})",
    )


def in_plain_words(error: ClientError, address: str) -> str:
    """One or two sentences for people: what happened and what can be done."""
    match error:
        case Unreachable():
            # What gRPC says of a refused connection is long and no news.
            why = "nobody listens there" if "failed to connect" in str(error) else str(error)
            return (
                f"no Tailrace server answers at {address}: {why}.\n"
                "Start one with `tailrace up`, or name another with --server HOST:PORT."
            )
        case Overloaded():
            return f"the server is full; try again in {error.retry_after_s:g} s ({error})."
        case InvalidRequest(field=field) if field and field not in str(error):
            return f"the server refuses {field}: {error}."
        case StreamCut():
            return f"the answer is not whole: {error}."
        case _:
            return f"{error}."


def exit_code_of(error: ClientError) -> ExitCode:
    """The exit code that tells scripts what kind of failure it was."""
    return ExitCode.UNREACHABLE if isinstance(error, Unreachable) else ExitCode.FAILED
