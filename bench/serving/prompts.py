"""Prompts of exact lengths in tokens, from a seed: nothing is downloaded, and every server gets the same text."""

from __future__ import annotations

import random
from pathlib import Path

from tokenizers import Tokenizer

_WORDS = """
river water wheel mill stone bridge valley winter summer morning evening garden market window letter story engine paper
silver copper forest mountain harbour island captain teacher farmer doctor painter singer carries follows answers
remembers measures gathers opens closes turns holds builds crosses finds keeps
""".split()  # noqa: SIM905  # a list of 45 quoted words is no easier to read


class Prompts:
    """Makes texts that this model's tokenizer turns into a given number of ids."""

    def __init__(self, model: Path, seed: int) -> None:
        self._tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        self._random = random.Random(seed)

    def text(self, tokens: int) -> str:
        """A text of exactly so many tokens; two calls give different ones."""
        words = [self._random.choice(_WORDS) for _ in range(tokens)]
        text = " ".join(words)
        while True:
            ids = self._tokenizer.encode(text, add_special_tokens=False).ids
            if len(ids) == tokens:
                return text
            if len(ids) < tokens:
                text += " " + self._random.choice(_WORDS)
            else:  # cut ids may join otherwise when they are encoded again, so the result is looked at again
                text = self._tokenizer.decode(ids[:tokens])
