"""One version, wherever it is said."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from services import runtime
from tests.architecture.source import ROOT, text_of


def project_version() -> str:
    return str(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"])


def test_the_running_version_is_the_packaged_one() -> None:
    assert runtime.__version__ == project_version()


def test_the_changelog_opens_with_this_version_or_what_comes_after_it() -> None:
    first = re.search(r"^## \[?([^\]\s]+)", text_of(Path("CHANGELOG.md")), re.MULTILINE)
    assert first is not None
    assert first[1] in {project_version(), "Unreleased"}
