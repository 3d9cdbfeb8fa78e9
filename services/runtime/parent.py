"""Ends this process when the one that started it ends, even by SIGKILL, so that no orphan keeps a port or a GPU."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from collections.abc import Mapping

PARENT_VARIABLE = "TAILRACE_PARENT_PID"
WATCH_INTERVAL_S = 0.5
_PR_SET_PDEATHSIG = 1


def die_with_parent(environ: Mapping[str, str] = os.environ) -> None:
    """From now on, the parent's end is this process's end (SIGKILL: nobody is left to watch a drain).

    A starter that sets TAILRACE_PARENT_PID to its own pid also covers the moment before this call. On Linux the kernel
    watches the *thread* that started us: start children from a thread that lives as long as the process.
    """
    expected = int(environ.get(PARENT_VARIABLE) or os.getppid())
    if sys.platform == "linux":
        _ask_the_kernel()
    else:
        watch_parent(expected)
    if os.getppid() != expected:  # it ended before it was watched
        os.kill(os.getpid(), signal.SIGKILL)


def watch_parent(expected: int) -> threading.Thread:
    """Looks every WATCH_INTERVAL_S, in a thread, whether the parent is there; for where the kernel cannot be asked."""

    def watch() -> None:
        while os.getppid() == expected:
            time.sleep(WATCH_INTERVAL_S)
        os.kill(os.getpid(), signal.SIGKILL)

    thread = threading.Thread(target=watch, name="parent watch", daemon=True)
    thread.start()
    return thread


def _ask_the_kernel() -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"prctl: {os.strerror(code)}")
