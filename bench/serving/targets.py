"""Who is asked: a server behind OpenAI's HTTP API, or ours over gRPC."""

from __future__ import annotations

import json
import time
from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

import aiohttp

from bench.serving.loads import Ask
from tailrace.client import Client, ClientError, Completed, Delta


@dataclass(slots=True)
class Heard:
    """One answer as its caller saw it; moments are monotonic seconds."""

    sent_at: float
    moments: list[float] = field(default_factory=list)
    output_tokens: int = 0
    cached_tokens: int = 0

    @property
    def ttft_s(self) -> float:
        """From the sending to the first text."""
        return self.moments[0] - self.sent_at

    @property
    def tpot_s(self) -> float:
        """Per token after the first one; 0 for an answer of one."""
        rest = self.output_tokens - 1
        return (self.moments[-1] - self.moments[0]) / rest if rest > 0 else 0.0


class Target(Protocol):
    """Something that answers."""

    @abstractmethod
    async def ask(self, ask: Ask) -> Heard:
        """One request, to its end. Raises OSError when it isn't answered whole, NotImplementedError if it can't ask."""

    async def __aenter__(self) -> Self: ...
    async def __aexit__(self, *exc: object) -> None: ...


class HttpTarget(Target):
    """`/v1/completions`, streamed, with usage. `plain_schema`: a schema goes by itself, not in `response_format`."""

    def __init__(self, url: str, model: str, *, plain_schema: bool = False) -> None:
        self._url = url
        self._model = model
        self._plain_schema = plain_schema

    async def __aenter__(self) -> Self:
        # A connection for each request: llama.cpp's server closes its own after a stream, without saying so before.
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        self._session = aiohttp.ClientSession(
            connector=connector, timeout=aiohttp.ClientTimeout(total=None, sock_read=600)
        )
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._session.close()

    async def ask(self, ask: Ask) -> Heard:
        """One completion."""
        body: dict[str, Any] = {
            "model": self._model,
            "prompt": ask.prompt,
            "max_tokens": ask.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if ask.schema is None:
            body["ignore_eos"] = True
        elif self._plain_schema:
            body["json_schema"] = json.loads(ask.schema)
        else:
            schema = json.loads(ask.schema)
            body["response_format"] = {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}}
        heard = Heard(time.perf_counter())
        try:
            await self._hear(body, heard)
        except aiohttp.ClientError as error:
            raise OSError(f"the connection broke: {error!r}") from error
        if not heard.moments or not heard.output_tokens:
            raise OSError("the answer has no text or no usage")
        return heard

    async def _hear(self, body: dict[str, Any], heard: Heard) -> None:
        async with self._session.post(f"{self._url}/v1/completions", json=body) as response:
            if response.status != 200:
                raise OSError(f"HTTP {response.status}: {(await response.text())[:300]}")
            async for line in response.content:
                if line.startswith(b"data: {"):
                    _take(heard, json.loads(line[6:]))


def _take(heard: Heard, event: dict[str, Any]) -> None:
    if "error" in event:
        raise OSError(str(event["error"]))
    if any(choice.get("text") for choice in event.get("choices", ())):
        heard.moments.append(time.perf_counter())
    if usage := event.get("usage"):
        heard.output_tokens = usage["completion_tokens"]
        heard.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


class GrpcTarget(Target):
    """Ours, through its own client."""

    def __init__(self, address: str) -> None:
        self._client = Client(address)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self._client.close()

    async def ask(self, ask: Ask) -> Heard:
        """One Generate."""
        if ask.schema is not None:
            raise NotImplementedError("structured loads are asked over HTTP")
        heard = Heard(time.perf_counter())
        try:
            async for event in self._client.generate(
                ask.prompt, max_tokens=ask.max_tokens, ignore_eos=True, temperature=0.0
            ):
                if isinstance(event, Delta):
                    heard.moments.append(time.perf_counter())
                elif isinstance(event, Completed):
                    heard.output_tokens = event.usage.output_tokens
                    heard.cached_tokens = event.usage.cached_prompt_tokens
        except ClientError as error:
            raise OSError(f"not answered: {error!r}") from error
        return heard
