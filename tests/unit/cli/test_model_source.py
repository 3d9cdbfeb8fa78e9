from __future__ import annotations

from pathlib import Path

import pytest

from cli.model_source import NoModel, model_directory


def test_a_directory_is_used_as_it_is(tmp_path: Path) -> None:
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{}")
    assert model_directory(tmp_path) == tmp_path


def test_a_directory_that_is_no_model_is_refused_with_what_it_lacks(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(NoModel, match=r"no tokenizer\.json"):
        model_directory(tmp_path)


def test_a_path_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NoModel, match="there is no"):
        model_directory(tmp_path / "nowhere")


def test_another_kind_of_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.bin"
    path.write_text("x")
    with pytest.raises(NoModel, match=r"neither a directory nor a \.gguf file"):
        model_directory(path)
