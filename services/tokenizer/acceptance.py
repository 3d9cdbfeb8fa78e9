"""From a valid request to one that can run: its prompt as ids, its limit within the context, its randomness drawn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from services.protocol.request import ChatPrompt, IdsPrompt, TextPrompt, ValidRequest
from services.runtime.error_tree import InvalidRequest
from services.tokenizer.entry import Pinned

DEADLINE_MARGIN_S = 0.1
"""How much earlier than the caller's own deadline we stop, so that it gets our answer and not its timeout."""


def prompt_field(request: ValidRequest) -> str:
    """What the caller calls its prompt."""
    match request.prompt:
        case TextPrompt():
            return "text"
        case IdsPrompt():
            return "token_ids.ids"
        case ChatPrompt():
            return "messages"


MAX_PROMPT_LOGPROBS = 32768
"""Of one request, the alternatives counted: half a megabyte between services, about one at the caller."""


def pin(
    request: ValidRequest, prompt_ids: Sequence[int], *, context_length: int, random_bits: Callable[[int], int]
) -> Pinned:
    """Fixes what was left open: id, seed, and max_tokens as what the context leaves.

    Raises InvalidRequest naming the prompt when it leaves no room for output.
    """
    room = context_length - len(prompt_ids)
    if room < 1:
        raise InvalidRequest(
            prompt_field(request),
            f"has {len(prompt_ids)} tokens; the context holds {context_length}, of which one at least is for output",
        )
    _check_prompt_logprobs(request.prompt_logprobs, len(prompt_ids))
    stopping = request.stopping
    seed = request.sampling.seed
    return pin_as(
        request,
        prompt_ids,
        request_id=request.request_id or f"req-{random_bits(96):024x}",
        seed=random_bits(64) if seed is None else seed,
        max_tokens=min(stopping.max_tokens or room, room),
    )


def _check_prompt_logprobs(alternatives: int | None, prompt_tokens: int) -> None:
    """They travel in one message on each hop, which must stay far below what a message may have."""
    if alternatives is None:
        return
    most = MAX_PROMPT_LOGPROBS // (1 + alternatives)
    if prompt_tokens > most:
        why = f"with {alternatives} alternatives can be told of at most {most} prompt tokens, not {prompt_tokens}"
        raise InvalidRequest("options.output.prompt_logprobs", why)


def pin_as(request: ValidRequest, prompt_ids: Sequence[int], *, request_id: str, seed: int, max_tokens: int) -> Pinned:
    """The same with what was fixed before, as another tokenizer left it."""
    stopping = request.stopping
    return Pinned(
        replace(
            request,
            request_id=request_id,
            sampling=replace(request.sampling, seed=seed),
            stopping=replace(stopping, max_tokens=max_tokens, min_tokens=min(stopping.min_tokens, max_tokens)),
        ),
        prompt_ids,
        asked=request,
    )


def deadline_of(request: ValidRequest, caller_deadline_s: float | None, now: float) -> float | None:
    """When the request ends with DEADLINE, as `now` counts; `caller_deadline_s` is what is left of the caller's own."""
    moments = []
    if request.timeout_ms:
        moments.append(now + request.timeout_ms / 1000)
    if caller_deadline_s is not None:
        moments.append(now + max(caller_deadline_s - DEADLINE_MARGIN_S, caller_deadline_s / 2))
    return min(moments, default=None)
