from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.protocol.request import (
    ChatPrompt,
    IdsPrompt,
    Message,
    Prompt,
    Sampling,
    Stopping,
    TextPrompt,
    ValidRequest,
)
from services.runtime.error_tree import InvalidRequest
from services.tokenizer.acceptance import deadline_of, pin
from services.tokenizer.entry import Pinned

bits: Callable[[int], int] = random.Random(3).getrandbits


def pinned(request: ValidRequest, prompt_tokens: int, context_length: int) -> Pinned:
    return pin(request, [5] * prompt_tokens, context_length=context_length, random_bits=bits)


@given(
    prompt=st.integers(1, 40),
    context=st.integers(2, 40),
    max_tokens=st.none() | st.integers(1, 60),
    min_tokens=st.integers(0, 60),
)
def test_prompt_and_output_never_exceed_the_context(
    prompt: int, context: int, max_tokens: int | None, min_tokens: int
) -> None:
    request = ValidRequest(
        request_id="r", prompt=TextPrompt("x"), stopping=Stopping(max_tokens=max_tokens, min_tokens=min_tokens)
    )
    if prompt >= context:
        with pytest.raises(InvalidRequest, match=f"has {prompt} tokens; the context holds {context}"):
            pinned(request, prompt, context)
        return
    stopping = pinned(request, prompt, context).request.stopping
    assert stopping.max_tokens == min(max_tokens or context, context - prompt)
    assert stopping.min_tokens <= stopping.max_tokens


@pytest.mark.parametrize(
    ("prompt", "field"),
    [(TextPrompt("x"), "text"), (IdsPrompt((1,)), "token_ids.ids"), (ChatPrompt((Message("user", "x"),)), "messages")],
)
def test_a_prompt_that_fills_the_context_is_refused_under_its_own_name(prompt: Prompt, field: str) -> None:
    with pytest.raises(InvalidRequest) as caught:
        pinned(ValidRequest(request_id="r", prompt=prompt), 8, 8)
    assert caught.value.field == field


def test_a_given_seed_is_kept_and_an_absent_one_is_drawn_with_the_id() -> None:
    given_seed = pinned(ValidRequest(request_id="r", prompt=TextPrompt("x"), sampling=Sampling(seed=0)), 1, 8).request
    assert (given_seed.sampling.seed, given_seed.request_id) == (0, "r")
    drawn = [pinned(ValidRequest(request_id="", prompt=TextPrompt("x")), 1, 8).request for _ in range(3)]
    assert len({request.sampling.seed for request in drawn}) == 3
    assert len({request.request_id for request in drawn}) == 3


def test_the_earlier_of_both_deadlines_counts_and_ours_comes_before_the_callers() -> None:
    request = ValidRequest(request_id="r", prompt=TextPrompt("x"), timeout_ms=2000)
    assert deadline_of(request, None, 10.0) == 12.0
    assert deadline_of(request, 1.0, 10.0) == pytest.approx(10.9)
    assert deadline_of(request, 0.1, 10.0) == pytest.approx(10.05)
    assert deadline_of(ValidRequest(request_id="r", prompt=TextPrompt("x")), None, 10.0) is None


@pytest.mark.parametrize(("alternatives", "most"), [(0, 32768), (20, 1560)])
def test_prompt_logprobs_are_refused_for_more_tokens_than_a_message_carries(alternatives: int, most: int) -> None:
    request = ValidRequest(request_id="r", prompt=IdsPrompt((5,)), prompt_logprobs=alternatives)
    pinned(request, most, 100_000)
    with pytest.raises(InvalidRequest) as refused:
        pinned(request, most + 1, 100_000)
    assert refused.value.field == "options.output.prompt_logprobs"
