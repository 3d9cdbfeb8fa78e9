"""Runs one planned step on an engine. A failure that can be blamed on one sequence ends that one and no other."""

from __future__ import annotations

from services.runtime.log import get_logger
from services.scheduler.batch import Opening, Plan
from services.scheduler.engine.api import Answer, Engine, Failed, FailureKind, SequenceKey, Slice

_log = get_logger("scheduler")


def execute(engine: Engine, plan: Plan) -> list[Answer]:
    """Tells the engine who left and who came, then steps; runs on the engine thread and raises nothing."""
    for key in plan.closes:
        _close(engine, key)
    refused = [failed for opening in plan.opens if (failed := _open(engine, opening)) is not None]
    slices = plan.slices
    if refused:
        keys = {failed.key for failed in refused}
        slices = [part for part in slices if part.key not in keys]
    return [*refused, *_step(engine, slices)] if refused else _step(engine, slices)


def _step(engine: Engine, slices: list[Slice]) -> list[Answer]:
    if not slices:
        return []
    try:
        return engine.step(slices)
    except Exception as error:  # noqa: BLE001  # the engine's edge: whatever it is, the process goes on
        if len(slices) == 1:
            return [_failed(slices[0].key, error)]
        _log.exception("a step failed; its sequences are run one by one", sequences=len(slices))
    # Running a slice again is harmless: it writes the same KV to the same places and draws with the same key.
    return [answer for part in slices for answer in _step(engine, [part])]


def _open(engine: Engine, opening: Opening) -> Failed | None:
    try:
        engine.open(opening.key, opening.spec, opening.prompt_ids, opening.output_ids)
    except Exception as error:  # noqa: BLE001  # likewise
        return _failed(opening.key, error)
    return None


def _close(engine: Engine, key: SequenceKey) -> None:
    try:
        engine.close(key)
    except Exception:  # noqa: BLE001  # likewise; it may never have been opened
        _log.exception("the engine could not close a sequence", key=key)


def _failed(key: SequenceKey, error: Exception) -> Failed:
    _log.error("the engine failed a sequence", key=key, exc=error)
    kind = FailureKind.OUT_OF_MEMORY if isinstance(error, MemoryError) else FailureKind.INTERNAL
    return Failed(key, kind, f"the engine failed: {type(error).__name__}")
