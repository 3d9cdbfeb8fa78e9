"""The `tailrace` command: finds the subcommand's file and hands it the rest of the line."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from cli.exit_code import ExitCode
from services.runtime import __version__

COMMANDS = {
    "up": "start the whole system here and stop it with Ctrl-C",
    "serve": "run one service in this process: gateway, tokenizer, detokenizer or scheduler",
    "chat": "talk with the model",
    "generate": "continue a prompt, streamed to standard output",
    "top": "watch the whole loop, live",
    "trace": "show one request's life over all services",
    "doctor": "say which link of the loop is stuck, since when, and what to do",
    "health": "ask a server whether it takes requests",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit code."""
    options = _parser().parse_args(argv)
    # Imported late: `serve` must not pay for what `chat` needs.
    command = importlib.import_module(f"cli.{options.command}")
    try:
        return int(command.main(options.rest))
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED


def _parser() -> argparse.ArgumentParser:
    lines = "\n".join(f"  {name:<10} {what}" for name, what in COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="tailrace",
        description="An LLM serving system in which every answer gets out.",
        epilog=f"commands:\n{lines}\n\n`tailrace COMMAND --help` says more.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"tailrace {__version__}")
    parser.add_argument("command", choices=COMMANDS, metavar="COMMAND", help="one of the commands below")
    parser.add_argument("rest", nargs=argparse.REMAINDER, metavar="...", help="the command's own options")
    return parser


if __name__ == "__main__":
    sys.exit(main())
