"""Where each accepted stream is served: at which tokenizer, and under which number.

A stream moves when its tokenizer is lost. Its old place is given up only once the new one is sure, and so is every
place where an Attach may have taken effect though its answer never came: a tokenizer that is told that its only reader
has left would stop the request.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from gateway.core import Stream
from gateway.releases import StreamEnd
from gateway.state import StreamPhase
from gateway.upstream import TokenizerLink


@dataclass(frozen=True, slots=True)
class Place:
    """A stream's number at one tokenizer."""

    link: TokenizerLink
    stream_id: int

    def leave(self, end: StreamEnd) -> None:
        """Nothing of the stream is wanted from there any more."""
        self.link.release(self.stream_id, end)


class Places:
    """The places of all streams that have one, and those that are in doubt.

    `grace_s`: how long a place in doubt is kept for a caller who was refused and may try again.
    """

    def __init__(self, *, grace_s: float) -> None:
        self._grace_s = grace_s
        self._places: dict[Stream, Place] = {}
        self._doubtful: dict[Stream, list[Place]] = {}

    def __len__(self) -> int:
        return len(self._places) + len(self._doubtful)

    def number_of(self, stream: Stream) -> int:
        """The stream's number where it is served, or was last."""
        return self._places[stream].stream_id

    def settle(self, stream: Stream, place: Place) -> None:
        """The stream is served there from now on, and nowhere else."""
        self.vacate(stream)
        self._places[stream] = place

    def doubt(self, stream: Stream, place: Place) -> None:
        """It may be served there too."""
        if stream.phase is StreamPhase.CLOSED:
            place.leave(StreamEnd.CALLER_GONE)
        else:
            place.link.streams.discard(place.stream_id)
            self._doubtful.setdefault(stream, []).append(place)

    def vacate(self, stream: Stream, end: StreamEnd = StreamEnd.CALLER_GONE) -> None:
        """Every place of the stream is left; `end` is told to the one that is sure."""
        if (place := self._places.pop(stream, None)) is not None:
            place.leave(end)
        for doubtful in self._doubtful.pop(stream, ()):
            doubtful.leave(StreamEnd.CALLER_GONE)

    def vacate_later(self, stream: Stream) -> None:
        """No tokenizer took the stream; its caller may come back to where it was in doubt."""
        if stream in self._doubtful:
            asyncio.get_running_loop().call_later(self._grace_s, self.vacate, stream)
