import ctypes
import gc
import re
from pathlib import Path

import pytest

from services.runtime.heap import give_back, settle

PIECES = 400_000
PIECE_BYTES = 100


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="another C library than glibc")
def test_what_was_freed_is_given_back() -> None:
    libc = ctypes.CDLL(None)
    libc.malloc.restype, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    pieces = [libc.malloc(PIECE_BYTES) for _ in range(PIECES)]
    for piece in pieces[:-1]:
        libc.free(piece)  # the last one stays, and with it, without more ado, all that lies below it
    before = _anonymous_bytes()
    give_back()
    assert before - _anonymous_bytes() > PIECES * PIECE_BYTES / 2
    libc.free(pieces[-1])


def test_what_lives_for_ever_is_collected_no_more() -> None:
    frozen = gc.get_freeze_count()
    kept = [[number] for number in range(1000)]
    try:
        settle()
        assert gc.get_freeze_count() >= frozen + len(kept)
    finally:
        gc.unfreeze()


def _anonymous_bytes() -> int:
    (kilobytes,) = re.findall(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text(encoding="ascii"))
    return 1024 * int(kilobytes)
