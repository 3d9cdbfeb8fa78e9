import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.runtime import log


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no")


class TwoLines:
    def __repr__(self) -> str:
        return "one\ntwo"


CIRCLE: list[object] = []
CIRCLE.append(CIRCLE)


class Closed(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


@pytest.fixture(autouse=True)
def logging_restored() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger(log.ROOT)
    before = root.handlers[:], root.level, ours.level
    root.handlers = []  # pytest's own, which `force` would close
    yield
    root.handlers, _, _ = before
    root.setLevel(before[1])
    ours.setLevel(before[2])
    logging.captureWarnings(False)


def configured(form: log.LogFormat = "json", level: log.LogLevel = "info", stream: io.StringIO | None = None) -> Any:
    out = stream if stream is not None else io.StringIO()
    log.configure(form=form, level=level, stream=out)
    return out


def only_line(out: io.StringIO) -> dict[str, Any]:
    (line,) = out.getvalue().splitlines()
    parsed = json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert isinstance(parsed, dict)
    return parsed


def test_a_json_line_holds_the_message_first_and_then_the_fields() -> None:
    out = configured()
    log.get_logger("tokenizer").info("request finished", request_id="r-1", reason="STOP", output_tokens=12)
    line = only_line(out)
    assert list(line) == ["time", "level", "logger", "message", "request_id", "reason", "output_tokens"]
    assert (line["level"], line["logger"], line["message"]) == ("info", "tokenizer", "request finished")
    assert (line["request_id"], line["output_tokens"]) == ("r-1", 12)
    assert line["time"].endswith("Z")


def test_a_text_line_reads_as_words() -> None:
    out = configured("text")
    log.get_logger("tokenizer").warning("request finished", request_id="r-1", text='say "hi"', tokens=[1, 2], none=None)
    (line,) = out.getvalue().splitlines()
    assert line[12:] == (
        ' WARNING tokenizer  request finished  request_id=r-1 text="say \\"hi\\"" tokens=[1, 2] none=None'
    )


@pytest.mark.parametrize(
    ("form", "stream", "expected"),
    [
        ("auto", io.StringIO, "json"),
        ("auto", Terminal, "colours"),
        ("text", io.StringIO, "text"),
        ("json", Terminal, "json"),
    ],
)
def test_the_form_follows_the_stream_unless_told(form: log.LogFormat, stream: type[io.StringIO], expected: str) -> None:
    out = configured(form, stream=stream())
    log.get_logger("x").info("event", key=1)
    line = out.getvalue()
    found = "json" if line.startswith("{") else "colours" if "\x1b[" in line else "text"
    assert found == expected


def test_events_below_the_level_cost_no_formatting() -> None:
    out = configured(level="info")
    log.get_logger("x").debug("event", value=Unprintable())
    assert out.getvalue() == ""
    assert not log.get_logger("x").enabled(logging.DEBUG)


def test_other_peoples_loggers_are_silent_below_a_warning_even_when_ours_debug() -> None:
    out = configured(level="debug")
    logging.getLogger("asyncio").info("using selector")
    log.get_logger("x").debug("ours")
    assert only_line(out)["message"] == "ours"
    logging.getLogger("asyncio").warning("slow %s", "callback")
    assert json.loads(out.getvalue().splitlines()[1])["message"] == "slow callback"


def test_bound_fields_are_on_every_event_and_do_not_leak_to_the_parent() -> None:
    out = configured()
    parent = log.get_logger("x")
    child = parent.bind(request_id="r-1").bind(choice=0)
    child.info("one", choice=1)
    parent.info("two")
    one, two = map(json.loads, out.getvalue().splitlines())
    assert (one["request_id"], one["choice"]) == ("r-1", 1)
    assert "request_id" not in two


def test_fields_may_have_the_names_of_the_lines_own_keys() -> None:
    out = configured()
    log.get_logger("x").info("event", message="inner", level=3, self=4)
    line = only_line(out)
    assert (line["message"], line["message_"], line["level_"], line["self"]) == ("event", "inner", 3, 4)


def test_an_exception_is_one_json_line_with_its_traceback() -> None:
    out = configured()
    try:
        raise ValueError("broken\nin two lines")
    except ValueError:
        log.get_logger("x").exception("failed", request_id="r-1")
    line = only_line(out)
    assert line["exception"].startswith("Traceback")
    assert "broken\nin two lines" in line["exception"]
    assert line["request_id"] == "r-1"


def test_a_value_cannot_forge_a_second_line() -> None:
    out = configured("text")
    log.get_logger("x").info("event", request_id="r\n12:00:00.000 INFO forged\x1b[31m")
    (line,) = out.getvalue().splitlines()
    assert "\x1b" not in line


@pytest.mark.parametrize("form", ["json", "text"])
def test_a_long_value_is_cut(form: log.LogFormat) -> None:
    out = configured(form)
    log.get_logger("x").info("event", text="a" * 100_000, ids=list(range(100_000)))
    assert len(out.getvalue()) < 3 * log.VALUE_CHARS_MAX
    assert "100000 characters" in out.getvalue()


@pytest.mark.parametrize("form", ["json", "text"])
@pytest.mark.parametrize(
    "value",
    [
        pytest.param(Unprintable(), id="broken repr"),
        pytest.param(TwoLines(), id="repr of two lines"),
        pytest.param([Unprintable()], id="broken repr in a list"),
        pytest.param("\ud800", id="lone surrogate"),
        pytest.param("é\0", id="NUL"),
        pytest.param(float("nan"), id="NaN"),
        pytest.param(float("-inf"), id="infinity"),
        pytest.param(10**400, id="long integer"),
        pytest.param(10**5000, id="integer too long to print"),
        pytest.param(b"\xff", id="bytes"),
        pytest.param({1: {2}}, id="not JSON's"),
        pytest.param(CIRCLE, id="holds itself"),
        pytest.param(object(), id="object"),
    ],
)
def test_any_value_can_be_logged(form: log.LogFormat, value: object) -> None:
    out = configured(form)
    log.get_logger("x").info("event", value=value)
    assert out.getvalue().count("\n") == 1
    assert "event" in out.getvalue()
    if form == "json":
        assert "value" in only_line(out)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.binary() | st.text(st.characters()),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner) | st.tuples(inner),
    max_leaves=5,
)


@given(
    st.dictionaries(st.sampled_from(["request_id", "message", "level", "_x", "text"]), anything),
    st.sampled_from(["json", "text"]),
)
def test_any_fields_make_exactly_one_line(fields: dict[str, object], form: log.LogFormat) -> None:
    out = configured(form)
    log.get_logger("x").info("event", **fields)
    assert out.getvalue().count("\n") == 1
    if form == "json":
        assert set(fields) <= set(only_line(out)) | set(log._RESERVED)


def test_a_closed_stream_is_not_the_callers_problem(capsys: pytest.CaptureFixture[str]) -> None:
    configured(stream=Closed())
    log.get_logger("x").error("event")
    assert capsys.readouterr() == ("", "")


def test_a_format_string_that_does_not_fit_is_still_logged() -> None:
    out = configured()
    logging.getLogger("library").warning("%d of %d", "one")
    assert only_line(out)["message"] == "%d of %d"
