"""`--model FILE.gguf` becomes a directory that every service can load."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.model_source import NEEDED_FILES, NoModel, model_directory
from tests.integration.model.gguf_files import write_small_llama


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_a_gguf_file_is_linked_to_from_a_directory_of_its_name(tmp_path: Path) -> None:
    file = write_small_llama(tmp_path / "mine.gguf")
    directory = model_directory(file)
    assert directory.name == "mine"
    assert all((directory / name).exists() for name in NEEDED_FILES)
    assert (directory / "model.gguf").resolve() == file


def test_a_gguf_file_that_is_not_supported_is_refused_and_says_why(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(NoModel, match="the line above says why"):
        model_directory(write_small_llama(tmp_path / "other.gguf", architecture="phi3"))
    assert "general.architecture is 'phi3'; supported: llama" in capfd.readouterr().err
