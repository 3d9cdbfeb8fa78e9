"""/v1/completions: reads the request, and says how pieces of its answer look."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gateway.openai.call import STRUCTURAL, Call, choices_of, deliver, read_flag, read_model, read_stream
from gateway.openai.echo import NOTHING, Echo, ask_for_echo
from gateway.openai.logprobs import CompletionLogprobs
from gateway.openai.parameters import COMPLETIONS, read_parameters
from gateway.openai.prompts import Prompt, read_prompts
from services.protocol.request import MAX_CHOICES
from services.runtime.errors import InvalidRequest
from tailrace.v1 import generation_pb2


class CompletionsForm:
    """Completions' shapes. Several prompts are several requests; choices are numbered through, n per prompt."""

    letter = "t"
    id_prefix = "cmpl-"
    whole_object = "text_completion"
    chunk_object = "text_completion"

    def read(self, body: Mapping[str, Any], request_id: str) -> Call:
        """A completion request. Raises InvalidRequest naming the parameter."""
        given = read_parameters(body, COMPLETIONS, STRUCTURAL | {"prompt", "echo"})
        stream, include_usage = read_stream(body)
        deliver(given, stream=stream)
        model, prompts, n = read_model(body), read_prompts(body.get("prompt")), choices_of(given)
        if len(prompts) * n > MAX_CHOICES:
            where = "prompt" if len(prompts) > 1 else "n"
            raise InvalidRequest(where, f"{len(prompts)} × n = {n} choices are more than the {MAX_CHOICES} allowed")
        if echo := read_flag(body, "echo"):
            ask_for_echo(given, prompts, stream=stream)
        requests = [
            _request(request_id if len(prompts) == 1 else f"{request_id}:{index}", model, prompt, given.options)
            for index, prompt in enumerate(prompts)
        ]
        return Call(
            requests=requests,
            n=n,
            stream=stream,
            include_usage=include_usage,
            names=given.names,
            echoes=[Echo(prompt) if echo else NOTHING for prompt in prompts],
        )

    def opening(self) -> None:
        """A choice opens with its first text."""

    def piece(self, text: str) -> Mapping[str, Any]:
        """Some text; empty at the choice's end."""
        return {"text": text}

    def whole(self, text: str) -> Mapping[str, Any]:
        """All of it."""
        return {"text": text}

    def logprobs(self, text_offset: int = 0) -> CompletionLogprobs:
        """Writes one choice's token-level output."""
        return CompletionLogprobs(text_offset)


def _request(
    request_id: str, model: str, prompt: Prompt, options: generation_pb2.GenerationOptions
) -> generation_pb2.GenerateRequest:
    if isinstance(prompt, str):
        return generation_pb2.GenerateRequest(request_id=request_id, model=model, text=prompt, options=options)
    return generation_pb2.GenerateRequest(request_id=request_id, model=model, token_ids=prompt, options=options)
