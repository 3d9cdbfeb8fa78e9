"""A seed is a run: the same story, whatever the interpreter's hashes and addresses are."""

from __future__ import annotations

import os
import re
import subprocess
import sys

from tests.conftest import ROOT

SEEDS = (11, 32, 34)


def story(seed: int, hash_seed: int) -> str:
    command = [sys.executable, "-m", "tests.simulation", "--seed", str(seed), "--trace"]
    environment = {
        **os.environ,
        "PYTHONHASHSEED": str(hash_seed),
        "PYTHONPATH": f"{ROOT}:{ROOT}/build/gen:{ROOT}/clients/python",
    }
    told = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, check=False, timeout=60)
    assert "virtual seconds" in told.stdout, told.stderr
    return re.sub(r"pid=\d+", "", told.stdout)


def test_the_same_seed_gives_the_same_story_in_any_process() -> None:
    for seed in SEEDS:
        first, second = story(seed, 1), story(seed, 2)
        assert len(first.splitlines()) > 100
        assert first == second
