"""The fuzzer of `make fuzz`: it finds what is planted, keeps it, and the text path stands a short run of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tests.fuzz.loop import Fuzzer
from tests.fuzz.text import text


def planted(data: bytes) -> Iterator[int]:
    """Breaks at an input that chance alone would need billions of tries for; its states lead there."""
    for count in range(min(len(data), 4)):
        if data[count] != b"trap"[count]:
            return
        yield count
    assert len(data) < 4, "trapped"


def test_a_planted_fault_is_found_kept_and_tried_first_the_next_time(tmp_path: Path) -> None:
    lines: list[str] = []
    failure = Fuzzer(planted, tmp_path, seed=1).run(60, lines.append)
    assert failure is not None
    assert failure.read_bytes().startswith(b"trap")
    assert "trapped" in lines[-1]
    again = Fuzzer(planted, tmp_path, seed=2)
    assert again.run(60, lines.append) == failure
    assert again.executions == 1


def test_the_text_path_stands_a_short_run_and_says_how_far_it_came(tmp_path: Path) -> None:
    lines: list[str] = []
    fuzzer = Fuzzer(text, tmp_path, seed=3)
    assert fuzzer.run(1.0, lines.append) is None
    assert len(fuzzer.corpus) > 5
    assert f"{fuzzer.executions:,} executions" in lines[-1]
