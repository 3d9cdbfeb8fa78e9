"""`tailrace serve SERVICE`: one service in this process, with the service's own flags."""

from __future__ import annotations

import argparse
import runpy
import sys
from collections.abc import Sequence

from cli.exit_code import ExitCode

MODULES = {
    "gateway": "gateway",
    "tokenizer": "services.tokenizer",
    "detokenizer": "services.detokenizer",
    "scheduler": "services.scheduler",
}


def main(argv: Sequence[str]) -> int:
    """Becomes the service: the same as `python -m` with its module, whose exit code it leaves with."""
    options = _parser().parse_args(argv)
    sys.argv = [options.service, *options.flags]
    runpy.run_module(MODULES[options.service], run_name="__main__", alter_sys=True)
    return ExitCode.OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tailrace serve",
        description="Runs one service in this process until SIGTERM or Ctrl-C.",
        epilog="`tailrace serve SERVICE --help` lists the service's own flags.",
    )
    parser.add_argument("service", choices=MODULES, metavar="SERVICE", help=f"one of {', '.join(MODULES)}")
    parser.add_argument("flags", nargs=argparse.REMAINDER, metavar="...", help="the service's own flags")
    return parser
