"""The flags of `generate` and `chat` that say how to sample, and when to stop."""

from __future__ import annotations

import argparse
from typing import cast

from tailrace.client import Options


def add_sampling_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags; what isn't given is left to the server."""
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-tokens", type=int, metavar="N", help="most output tokens (default: what fits)")
    group.add_argument("--temperature", type=float, metavar="T", help="0 is greedy (default: 1)")
    group.add_argument("--top-p", type=float, metavar="P", help="keep the likeliest tokens that sum to P")
    group.add_argument("--top-k", type=int, metavar="K", help="keep the K likeliest tokens")
    group.add_argument("--min-p", type=float, metavar="P", help="drop tokens less likely than P times the likeliest")
    group.add_argument("--repetition-penalty", type=float, metavar="X", help="above 1 repeats less")
    group.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same answer")
    group.add_argument("--stop", action="append", metavar="TEXT", help="end before this text; may be repeated")
    group.add_argument("--ignore-eos", action="store_true", default=None, help="don't end at the model's end-of-text")
    group.add_argument("--timeout-s", type=float, metavar="SECONDS", help="end the answer after this time")


def sampling_options(parsed: argparse.Namespace) -> Options:
    """The flags that were given, as the client's options."""
    names = Options.__annotations__.keys() & vars(parsed).keys()
    given = {name: getattr(parsed, name) for name in names if getattr(parsed, name) is not None}
    return cast(Options, given)  # argparse has checked the types
