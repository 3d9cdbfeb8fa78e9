"""Logs are events with fields: one line each, coloured text on a terminal, JSON elsewhere. Logging never raises.

    log = get_logger("tokenizer")
    log.info("request finished", request_id=request_id, reason="STOP", output_tokens=12)

Our loggers stand on the standard library's, below "tailrace", so other people's lines share the handler and the form.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import time
from collections.abc import Mapping
from typing import Literal, TextIO

LogFormat = Literal["auto", "text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]

ROOT = "tailrace"
VALUE_CHARS_MAX = 2000  # of one value; a line must not grow with somebody's prompt
LIST_ITEMS_MAX = 100

_RESERVED = ("time", "level", "logger", "message", "exception")
_COLOURS = {logging.DEBUG: "\x1b[2m", logging.INFO: "\x1b[32m", logging.WARNING: "\x1b[33m", logging.ERROR: "\x1b[31m"}
_DIM, _RESET = "\x1b[2m", "\x1b[0m"


class Logger:
    """Writes events of one part of a process; cheap where its level is off."""

    __slots__ = ("_fields", "_logger")

    def __init__(self, logger: logging.Logger, fields: Mapping[str, object]) -> None:
        self._logger = logger
        self._fields = fields

    def bind(self, **fields: object) -> Logger:
        """A logger that adds these fields to every event."""
        return Logger(self._logger, {**self._fields, **fields})

    def enabled(self, level: int) -> bool:
        """Whether an event of this level (such as logging.DEBUG) would be written."""
        return self._logger.isEnabledFor(level)

    def debug(self, message: str, /, **fields: object) -> None:
        """For whoever works on this code."""
        self._write(logging.DEBUG, message, fields)

    def info(self, message: str, /, **fields: object) -> None:
        """The normal course of things."""
        self._write(logging.INFO, message, fields)

    def warning(self, message: str, /, **fields: object) -> None:
        """Something an operator may want to look at."""
        self._write(logging.WARNING, message, fields)

    def error(self, message: str, /, *, exc: BaseException | None = None, **fields: object) -> None:
        """Something failed and somebody noticed; `exc` adds its traceback."""
        self._write(logging.ERROR, message, fields, exc)

    def exception(self, message: str, /, **fields: object) -> None:
        """An error with the traceback of the exception that is being handled."""
        self._write(logging.ERROR, message, fields, sys.exc_info()[1])

    def _write(self, level: int, message: str, fields: dict[str, object], exc: BaseException | None = None) -> None:
        if not self._logger.isEnabledFor(level):
            return
        traceback = (type(exc), exc, exc.__traceback__) if exc is not None else None
        # Made here and not through Logger.log, which walks the stack for a file and line that no format shows.
        record = logging.LogRecord(self._logger.name, level, "", 0, message, None, traceback)
        record.fields = {**self._fields, **fields} if self._fields else fields
        self._logger.handle(record)


def get_logger(name: str) -> Logger:
    """The logger of one part of the system, such as "tokenizer"."""
    return Logger(logging.getLogger(f"{ROOT}.{name}"), {})


def configure(*, form: LogFormat, level: LogLevel, stream: TextIO | None = None) -> None:
    """Sends all logs of this process to `stream` (default: standard error); called once, by the process's edge.

    Below a warning, other people's libraries stay silent at every level of ours.
    """
    out = stream or sys.stderr
    text = form == "text" or (form == "auto" and out.isatty())
    handler = _SilentHandler(out)
    handler.setFormatter(TextFormatter(colours=out.isatty()) if text else JsonFormatter())
    logging.basicConfig(handlers=[handler], level=logging.WARNING, force=True)
    logging.getLogger(ROOT).setLevel(level.upper())
    logging.captureWarnings(True)


class _SilentHandler(logging.StreamHandler[TextIO]):
    """Drops a line that cannot be written: a closed pipe must not become an error of the work being logged."""

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802  # the base's name
        """Says nothing."""


class TextFormatter(logging.Formatter):
    """`12:03:04.123 INFO    tokenizer  request finished  request_id=r-1 reason=STOP`"""

    def __init__(self, *, colours: bool) -> None:
        super().__init__()
        self._colours = colours

    def format(self, record: logging.LogRecord) -> str:
        at = time.strftime("%H:%M:%S", time.localtime(record.created)) + f".{int(record.msecs):03d}"
        fields = " ".join(f"{key}={_as_word(value)}" for key, value in _fields_of(record).items())
        level = f"{record.levelname:<7}"
        if self._colours:
            at, fields = f"{_DIM}{at}{_RESET}", f"{_DIM}{fields}{_RESET}" if fields else ""
            level = f"{_COLOURS.get(record.levelno, '')}{level}{_RESET}"
        line = f"{at} {level} {_short_name(record)}  {_message_of(record)}" + (f"  {fields}" if fields else "")
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class JsonFormatter(logging.Formatter):
    """One JSON object: time (UTC, RFC 3339), level, logger, message, then the fields; `exception` holds a traceback."""

    def format(self, record: logging.LogRecord) -> str:
        at = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{int(record.msecs):03d}Z"
        line: dict[str, object] = {
            "time": at,
            "level": record.levelname.lower(),
            "logger": _short_name(record),
            "message": _message_of(record),
        }
        for key, value in _fields_of(record).items():
            line[f"{key}_" if key in _RESERVED else key] = _as_json(value)
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, allow_nan=False)


def _fields_of(record: logging.LogRecord) -> Mapping[str, object]:
    return getattr(record, "fields", {})


def _short_name(record: logging.LogRecord) -> str:
    return record.name.removeprefix(f"{ROOT}.")


def _message_of(record: logging.LogRecord) -> str:
    try:
        return record.getMessage()
    except Exception:  # noqa: BLE001  # other people's format strings may not fit their arguments
        return str(record.msg)


def _as_word(value: object) -> str:
    """A value in a text line: bare where it reads as one word, otherwise quoted with its control characters escaped."""
    text = _bounded(value if isinstance(value, str) else _repr(value))
    bare = bool(text) and text.isascii() and not any(mark in text for mark in " \"'=\\")
    return text if text.isprintable() and (bare or not isinstance(value, str)) else json.dumps(text)


def _as_json(value: object) -> object:
    """A value that JSON carries as it is, one list deep, or else its text."""
    if isinstance(value, list | tuple) and len(value) <= LIST_ITEMS_MAX:
        return [_scalar(item) for item in value]
    return _scalar(value)


def _scalar(value: object) -> object:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return value if abs(value) < 1 << 64 else _bounded(_repr(value))
    if isinstance(value, float) and math.isfinite(value):
        return value
    return _bounded(value if isinstance(value, str) else _repr(value))


def _bounded(text: str) -> str:
    return text if len(text) <= VALUE_CHARS_MAX else f"{text[:VALUE_CHARS_MAX]}… ({len(text)} characters)"


def _repr(value: object) -> str:
    try:
        return repr(value)
    except Exception as error:  # noqa: BLE001  # a broken __repr__ is no reason to lose the event
        return f"<{type(value).__name__} whose repr raised {type(error).__name__}>"
