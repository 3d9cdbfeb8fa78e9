"""`tailrace serve SERVICE`: one service in this process, with the service's own flags."""

from __future__ import annotations

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
    """Becomes the service: the same as `python -m` with its module."""
    if not argv or argv[0] in ("-h", "--help"):
        print(_USAGE)
        return ExitCode.OK if argv else ExitCode.USAGE
    name, *flags = argv
    if name not in MODULES:
        print(f"tailrace serve: there is no service {name!r}; there are {', '.join(MODULES)}", file=sys.stderr)
        return ExitCode.USAGE
    sys.argv = [name, *flags]
    runpy.run_module(MODULES[name], run_name="__main__", alter_sys=True)
    return ExitCode.OK


_USAGE = f"""usage: tailrace serve SERVICE [flags]

Runs one service in this process until SIGTERM or Ctrl-C. SERVICE is one of {", ".join(MODULES)};
`tailrace serve SERVICE --help` lists its flags."""
