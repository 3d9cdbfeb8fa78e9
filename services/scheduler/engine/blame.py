"""What was raised over one sequence, as its answer."""

from __future__ import annotations

from services.runtime.log import get_logger
from services.scheduler.engine.api import Failed, FailureKind, SequenceKey

_log = get_logger("scheduler")


def blamed(key: SequenceKey, error: Exception) -> Failed:
    """The end of this sequence; the log tells more of the error than its caller learns."""
    _log.error("the engine failed a sequence", key=key, exc=error)
    kind = FailureKind.OUT_OF_MEMORY if isinstance(error, MemoryError) else FailureKind.INTERNAL
    return Failed(key, kind, f"the engine failed: {type(error).__name__}")
