from __future__ import annotations

import io

from cli.terminal import Terminal


class Tty(io.StringIO):
    """A text stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


class Closed(io.StringIO):
    """A pipe whose reader went away."""

    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_lines_of_services_are_aligned_and_plain_when_piped() -> None:
    out = io.StringIO()
    terminal = Terminal(out)
    terminal.service_line("gateway", "started")
    terminal.service_line("detokenizer", "started")
    first, second = out.getvalue().splitlines()
    assert first.index("│") == second.index("│")
    assert "\x1b" not in out.getvalue()


def test_a_line_is_written_above_the_status_line() -> None:
    out = Tty()
    terminal = Terminal(out)
    terminal.status("starting")
    terminal.plain("a line")
    assert out.getvalue().endswith("\r\x1b[Ka line\nstarting")


def test_the_status_line_is_left_out_when_piped() -> None:
    out = io.StringIO()
    Terminal(out).status("starting")
    assert out.getvalue() == ""


def test_held_lines_come_after_what_is_streamed() -> None:
    out = io.StringIO()
    terminal = Terminal(out)
    with terminal.held():
        terminal.write("one ")
        terminal.plain("a log line")
        terminal.write("two\n")
    assert out.getvalue() == "one two\na log line\n"


def test_a_reader_that_went_away_is_no_error() -> None:
    terminal = Terminal(Closed())
    terminal.plain("x")
    terminal.write("y")
