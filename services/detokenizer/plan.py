"""What the detokenizer knows of a request: how its ids become text, and what ends it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class TextPlan:
    """One request's options; the same for all its choices. See TextPlan in the contract.

    `min_tokens` counts output tokens. `begins_text`: the output is a text of its own, so that its first space is
    stripped where the tokenizer's decoder strips it. `end_token_ids`: the tokens at which the engine may end it.
    """

    stop: tuple[str, ...] = ()
    include_stop_in_output: bool = False
    min_tokens: int = 0
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = False
    begins_text: bool = False
    token_info: bool = False
    end_token_ids: frozenset[int] = frozenset()
