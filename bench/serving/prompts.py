"""Prompts of exact lengths in tokens, from a seed: nothing is downloaded, and every server gets the same text."""

from __future__ import annotations

import random
from pathlib import Path

from tokenizers import Tokenizer

from bench.texts import own_texts

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
        return self._exactly(tokens, " ".join(self._random.choice(_WORDS) for _ in range(tokens)))

    def prose(self, tokens: int) -> str:
        """The same of what somebody wrote: a place in a text of ours, from the start of a word on."""
        text = " ".join(own_texts())
        at = text.index(" ", self._random.randrange(len(text) - 12 * tokens)) + 1
        return self._exactly(tokens, text[at : at + 12 * tokens])

    def _exactly(self, tokens: int, text: str) -> str:
        while True:
            ids = self._tokenizer.encode(text, add_special_tokens=False).ids
            if len(ids) == tokens:
                return text
            if len(ids) < tokens:
                text += " " + self._random.choice(_WORDS)
            else:  # cut ids may join otherwise when they are encoded again, so the result is looked at again
                text = self._tokenizer.decode(ids[:tokens])
