"""docs/scenarios.md names tests; each of them must be there."""

from __future__ import annotations

import re
from pathlib import Path

from tests.architecture.source import ROOT, text_of

PAGE = Path("docs/scenarios.md")


def test_every_test_that_the_page_names_exists() -> None:
    there = {name for path in (ROOT / "tests").rglob("test_*.py") for name in _tests_of(path)}
    named = set(re.findall(r"`(test_\w+)`", text_of(PAGE)))
    assert named
    assert named <= there


def test_no_scenario_of_a_request_is_without_a_test() -> None:
    table = text_of(PAGE).partition("## Life of a request")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (\d+) \|.*`test_", table, re.MULTILINE)
    assert [int(number) for number in rows] == list(range(1, 26))


def _tests_of(path: Path) -> list[str]:
    return re.findall(r"^(?:async )?def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
