"""What the exit codes of `tailrace` mean, for scripts."""

from enum import IntEnum


class ExitCode(IntEnum):
    """0 is a whole answer, nothing less."""

    OK = 0
    FAILED = 1  # refused, cut, or a service was lost
    USAGE = 2  # the command line is wrong
    UNREACHABLE = 3  # no server there, or not ready
    INTERRUPTED = 130  # Ctrl-C, as shells count it
