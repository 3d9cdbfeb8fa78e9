"""`echo`: the prompt before each choice of a completion, with its tokens' log probabilities where those are asked for.

A prompt's tokens are told when all is computed, so an answer that begins with them can't be streamed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.openai.parameters import Given
from gateway.openai.prompts import Prompt
from services.protocol.events import TokenInfo
from services.runtime.errors import InvalidRequest

_ASKED = "output.prompt_logprobs"


@dataclass(frozen=True, slots=True)
class Echo:
    """What stands before each choice of one request; `tokens` as told at its end."""

    prompt: Prompt
    tokens: Sequence[TokenInfo] = ()

    @property
    def text(self) -> str:
        """The prompt as it was sent; of ids, what they spell."""
        return self.prompt if isinstance(self.prompt, str) else self.spelled

    @property
    def spelled(self) -> str:
        """What the tokens are together. A tokenizer may have put one before the caller's text, or a space."""
        return b"".join(token.bytes for token in self.tokens).decode("utf-8", "replace")

    @property
    def text_offset(self) -> int:
        """Where the first token stands in the text; below 0 where it is before the text."""
        return len(self.text) - len(self.spelled)


NOTHING = Echo("")


def ask_for_echo(given: Given, prompts: Sequence[Prompt], *, stream: bool) -> None:
    """Asks for what an echo needs and the caller doesn't have. Raises InvalidRequest where it is to be streamed."""
    if stream:
        raise InvalidRequest("echo", "can't be streamed: leave out echo or stream", reason="UNSUPPORTED_PARAMETER")
    output = given.options.output
    if output.HasField("logprobs") or not all(isinstance(prompt, str) for prompt in prompts):
        output.prompt_logprobs = output.logprobs
        given.names[_ASKED] = "echo"
