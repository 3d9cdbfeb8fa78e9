from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.admin_addresses import DEFAULTS, BadAddresses, admin_addresses, published
from cli.stack import Service

SERVICES = [Service("gateway", "gateway", "127.0.0.1:1", "127.0.0.1:11", 21, ())]


@pytest.fixture(autouse=True)
def _own_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def test_what_was_given_is_asked_with_its_names() -> None:
    assert admin_addresses("gateway=g:7100, t:7101") == [("gateway", "g:7100"), ("", "t:7101")]


@pytest.mark.parametrize("given", ["g", "g:", ":7100", "a=b", "g:http"])
def test_what_is_no_address_is_said_to_be_none(given: str) -> None:
    with pytest.raises(BadAddresses, match="host:port"):
        admin_addresses(given)


def test_a_stack_that_runs_here_is_found_and_one_that_has_ended_is_not() -> None:
    assert admin_addresses("") == DEFAULTS
    with published(SERVICES):
        assert admin_addresses("") == [("gateway", "127.0.0.1:11")]
    assert admin_addresses("") == DEFAULTS


def test_what_a_killed_one_left_behind_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "tailrace").mkdir()
    (tmp_path / "tailrace/4194999.json").write_text(json.dumps([("gateway", "127.0.0.1:9")]))
    (tmp_path / "tailrace/broken.json").write_text("{")
    assert admin_addresses("") == DEFAULTS


def test_of_several_stacks_one_has_to_be_named(tmp_path: Path) -> None:
    with published(SERVICES):
        (tmp_path / "tailrace/1.json").write_text(json.dumps([("gateway", "127.0.0.1:12")]))
        with pytest.raises(BadAddresses, match=r"gateway=127\.0\.0\.1:11.*gateway=127\.0\.0\.1:12|:12.*:11"):
            admin_addresses("")


def test_a_directory_that_cannot_be_written_is_no_reason_not_to_start(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "file"))
    with published(SERVICES):
        pass
