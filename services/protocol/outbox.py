"""What one reader of a batched stream still has to be sent: sequences with news first, then those being replayed.

Pure bookkeeping: the logs themselves belong to the sender, which takes keys from here and looks up what lies beyond the
reader's cursors.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


class Outbox(Generic[Key]):
    """The dirty sequences of one reader. A live one never waits behind a replay."""

    __slots__ = ("_live", "_replay")

    def __init__(self, replay: Iterable[Key] = ()) -> None:
        self._live: dict[Key, None] = {}
        self._replay: deque[Key] = deque(replay)

    def __bool__(self) -> bool:
        return bool(self._live or self._replay)

    def __len__(self) -> int:
        return len(self._live) + len(self._replay)

    def mark(self, key: Key) -> None:
        """A sequence has something new."""
        self._live[key] = None

    def mark_all(self, keys: Iterable[Key]) -> None:
        """Several sequences have something new."""
        self._live.update(dict.fromkeys(keys))

    def take_live(self) -> list[Key]:
        """All sequences with news, in the order they were first marked."""
        keys = list(self._live)
        self._live.clear()
        return keys

    def take_replay(self) -> Key | None:
        """The next sequence to be replayed, one at a time, so that live ones come between."""
        return self._replay.popleft() if self._replay else None

    def put_back(self, key: Key) -> None:
        """A sequence of whose replay there is more."""
        self._replay.appendleft(key)
