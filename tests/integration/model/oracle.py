"""What transformers gives for a real model, and the comparison that every native model must stand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from services.scheduler.engine.api import SamplingSpec
from tests.engine_driver import Job

NEW_TOKENS = 24
NEAR_TIE = 1e-4


@dataclass(frozen=True)
class Reference:
    """What transformers gave: ids, and by how much each one's logit led the second best."""

    tokens: list[int]
    margins: list[float]


class Oracle:
    """transformers on the exported folder, one prompt at a time; each is computed once."""

    def __init__(self, folder: Path, prompts: Sequence[str]) -> None:
        self.prompts = prompts
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    @cache  # noqa: B019 - lives as long as the session's only oracle
    def prompt(self, number: int) -> tuple[int, ...]:
        text = self.prompts[number]
        if number % 2 == 0 and self.tokenizer.chat_template:  # half of them as a chat
            chat = [{"role": "user", "content": text}]
            text = str(self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False))
        return tuple(self.tokenizer.encode(text))

    @cache  # noqa: B019 - lives as long as the session's only oracle
    def reference(self, number: int) -> Reference:
        ids = torch.tensor([self.prompt(number)])
        out = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
        best = [logits[0].topk(2).values.tolist() for logits in out.logits]
        return Reference(out.sequences[0, ids.shape[1] :].tolist(), [first - second for first, second in best])


def greedy_job(oracle: Oracle, number: int) -> Job:
    spec = SamplingSpec(seed=0, temperature=0.0)
    return Job(oracle.prompt(number), spec, len(oracle.reference(number).tokens))


def assert_same_ids(number: int, got: list[int], reference: Reference) -> None:
    """Equal, or different only from a near tie on, which is printed."""
    for position, (ours, theirs) in enumerate(zip(got, reference.tokens, strict=True)):
        if ours != theirs:
            margin = reference.margins[position]
            print(f"prompt {number}, position {position}: {ours} for {theirs}, margin {margin:.2e}")
            assert margin < NEAR_TIE, f"prompt {number} differs at {position}: {got} for {reference.tokens}"
            return
