"""What documentation is drawn from the code is as the code is now."""

from __future__ import annotations

from pathlib import Path

from deploy import dashboards, lifecycles, metrics_table
from tests.architecture.source import text_of


def test_the_table_of_metrics_is_current() -> None:
    assert text_of(Path("docs/metrics.md")) == metrics_table.table(), "run `make reference`"


def test_the_pictures_of_lifecycles_are_current() -> None:
    assert text_of(Path("docs/lifecycles.md")) == lifecycles.document(), "run `make reference`"


def test_grafanas_dashboards_are_current() -> None:
    written = {path.name: path.read_text() for path in dashboards.FOLDER.glob("*.json")}
    assert written == dict(dashboards.files()), "run `make reference`"


def test_every_transition_is_in_a_picture() -> None:
    document = lifecycles.document()
    for table in lifecycles.TABLES.values():
        for (phase, event), after in table.items():
            assert any(
                line.startswith(f"    {phase.name} --> {after.name}: ") and event.name in line
                for line in document.splitlines()
            ), (phase, event)
