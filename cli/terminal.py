"""What `tailrace up` writes: lines of several services with a coloured prefix, and one status line below them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import TextIO

_COLOURS = {"gateway": 36, "tokenizer": 35, "detokenizer": 34, "scheduler": 33}
_RESET, _BOLD, _DIM, _YELLOW, _RED = "\x1b[0m", "\x1b[1m", "\x1b[2m", "\x1b[33m", "\x1b[31m"
_CLEAR_LINE = "\r\x1b[K"
_WIDTH = max(map(len, _COLOURS))


class Terminal:
    """Writes to `out`; colours and the status line appear only where `out` is a terminal."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._tty = out.isatty()
        self._status = ""
        self._held: list[str] | None = None

    def service_line(self, service: str, line: str) -> None:
        """A line that a service wrote."""
        prefix = self._paint(f"{service:<{_WIDTH}} │", f"\x1b[{_COLOURS.get(service, 37)}m")
        self._line(f"{prefix} {self._paint(line, _level_colour(line))}")

    def say(self, text: str) -> None:
        """A line of our own."""
        self._line(self._paint(text, _BOLD))

    def warn(self, text: str) -> None:
        """A line about something that went wrong."""
        self._line(self._paint(text, _BOLD + _RED))

    def plain(self, text: str) -> None:
        """A text as it is."""
        self._line(text)

    def status(self, text: str) -> None:
        """Replaces the status line; "" removes it."""
        if self._tty and text != self._status:
            self._status = text
            self.write(_CLEAR_LINE + text)

    def write(self, text: str) -> None:
        """Part of a line, at once. A reader that went away (`| head`) is no reason to stop serving."""
        with suppress(OSError):
            self._out.write(text)
            self._out.flush()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside it, lines wait, so that they don't fall into what is being written piece by piece."""
        self._held = []
        try:
            yield
        finally:
            lines, self._held = self._held, None
            for line in lines:
                self._line(line)

    def _line(self, text: str) -> None:
        if self._held is not None:
            self._held.append(text)
            return
        before, after = (_CLEAR_LINE, self._status) if self._status else ("", "")
        self.write(f"{before}{text}\n{after}")

    def _paint(self, text: str, colour: str) -> str:
        return f"{colour}{text}{_RESET}" if self._tty and colour else text


def _level_colour(line: str) -> str:
    if " ERROR " in line:
        return _RED
    return _YELLOW if " WARNING " in line else ""
