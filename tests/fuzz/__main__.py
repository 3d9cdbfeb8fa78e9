"""`python -m tests.fuzz [--seconds 60] [--seed N] [--input FILE]`: fuzzes the text path; exits with 1 when it broke."""

from __future__ import annotations

import argparse
import random
from pathlib import Path

from tests.fuzz.loop import Fuzzer
from tests.fuzz.text import text

DIRECTORY = Path(__file__).resolve().parents[2] / "build/fuzz/text"


def main() -> int:
    """Reads the command line, fuzzes, says how far it came."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="how long (default %(default)s)")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 32), help="default: drawn")
    parser.add_argument("--input", type=Path, help="only this input, such as one that is kept of a failure")
    arguments = parser.parse_args()
    if arguments.input is not None:
        print(f"{len(set(text(arguments.input.read_bytes())))} states, nothing broken")
        return 0
    print(f"fuzzing text for {arguments.seconds:g} s, seed {arguments.seed}, kept in {DIRECTORY}", flush=True)
    fuzzer = Fuzzer(text, DIRECTORY, arguments.seed)
    failure = fuzzer.run(arguments.seconds, lambda line: print(line, flush=True))
    if failure is None:
        return 0
    print(f"once more: python -m tests.fuzz --input {failure}")
    return 1


if __name__ == "__main__":
    raise SystemExit(main())
