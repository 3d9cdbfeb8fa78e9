from __future__ import annotations

import pytest

from cli.exit_code import ExitCode
from cli.main import COMMANDS, main
from services.runtime import __version__


def test_version_is_the_runtimes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    assert left.value.code == 0
    assert capsys.readouterr().out.strip() == f"tailrace {__version__}"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main([command, "--help"])
    assert left.value.code == 0
    assert f"tailrace {command}" in capsys.readouterr().out


def test_an_unknown_command_lists_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["fly"])
    assert left.value.code == ExitCode.USAGE
    said = capsys.readouterr().err
    assert all(command in said for command in COMMANDS)


def test_no_server_is_said_in_plain_words_with_an_exit_code_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "hi", "--server", "127.0.0.1:1"]) == ExitCode.UNREACHABLE
    said = capsys.readouterr().err
    assert "tailrace up" in said
    assert "Traceback" not in said
    assert main(["health", "127.0.0.1:1"]) == ExitCode.UNREACHABLE


def test_an_unknown_service_is_refused_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["serve", "oracle"])
    assert left.value.code == ExitCode.USAGE
    assert "oracle" in capsys.readouterr().err
