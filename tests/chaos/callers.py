"""Callers who read an answer to its end, come back when they were cut off, and remember when what arrived."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp

from tailrace.client import Client, ClientError, Completed, Delta, Finish, Started
from tailrace.client.liveness import ANSWER_S, SILENCE_S

Transport = Literal["grpc", "sse"]
RECONNECTS_MAX = 100
RECONNECT_PAUSE_S = 0.25


@dataclass(frozen=True)
class Question:
    """One request; the same number always asks the same."""

    number: int
    max_tokens: int

    @property
    def transport(self) -> Transport:
        """Half of them each way."""
        return "grpc" if self.number % 2 == 0 else "sse"

    @property
    def greedy(self) -> bool:
        """Half of them, over each transport."""
        return self.number % 4 < 2

    @property
    def prompt(self) -> str:
        """Its text."""
        return f"Story number {self.number}: once upon a time"

    @property
    def sampling(self) -> dict[str, Any]:
        """Greedy, or drawn; the seed is given in both cases, since the fake engine's ids depend on it."""
        return {"temperature": 0.0 if self.greedy else 1.0, "seed": self.number}


@dataclass
class Answer:
    """What a caller got. `moments` are those at which something arrived, monotonic seconds."""

    question: Question
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    moments: list[float] = field(default_factory=list)
    finishes: int = 0
    completed: bool = False
    problem: str = ""

    def add(self, text: str, token_ids: Sequence[int] = ()) -> None:
        """Takes what arrived."""
        self.text += text
        self.token_ids += token_ids
        self.moments.append(time.perf_counter())

    @property
    def over(self) -> bool:
        """Whether nothing more will come."""
        return self.completed or bool(self.problem)

    @property
    def whole(self) -> bool:
        """One finish, one completion, no complaint."""
        return self.completed and self.finishes == 1 and not self.problem


async def ask_grpc(client: Client, answer: Answer) -> None:
    """Over gRPC with our own client, which comes back by itself."""
    question = answer.question
    stream = client.generate(question.prompt, max_tokens=question.max_tokens, ignore_eos=True, **question.sampling)
    try:
        async for event in stream:
            match event:
                case Delta():
                    answer.add(event.text, event.token_ids)
                case Finish():
                    answer.finishes += 1
                    if event.error is not None:
                        answer.problem = event.error
                case Completed():
                    answer.completed = True
                case Started():
                    pass
    except ClientError as error:
        answer.problem = f"{type(error).__name__}: {error}"


async def ask_sse(session: aiohttp.ClientSession, urls: Sequence[str], answer: Answer) -> None:
    """Over HTTP, as a browser's EventSource does it: after a cut, again with the last event's id."""
    caller = _SseCaller(session, urls, answer)
    for _ in range(RECONNECTS_MAX):
        try:
            if await caller.read():
                return
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
            caller.cut = f"{type(error).__name__}: {error}"
        if answer.problem:
            return
        await asyncio.sleep(RECONNECT_PAUSE_S)
    caller.close_left()
    answer.problem = f"cut off too often, at last by {caller.cut}"


class _SseCaller:
    """One answer over any number of connections."""

    def __init__(self, session: aiohttp.ClientSession, urls: Sequence[str], answer: Answer) -> None:
        self._session = session
        self._urls = urls
        self._answer = answer
        self._turn = answer.question.number // 2
        self._request_id = ""
        self._last_event_id = ""
        self._event: dict[bytes, bytes] = {}
        self._left: list[aiohttp.ClientResponse] = []
        self.cut = ""

    async def read(self) -> bool:
        """One connection, to its end; whether the answer is whole, or refused for good, then."""
        url = self._urls[self._turn % len(self._urls)]
        self._turn += 1
        self._event = {}
        response = await self._request(url)
        try:
            if response.status != 200:
                text = await response.text()
                if response.status >= 500 or response.status == 429:
                    self.cut = text
                    return False
                self._answer.problem = f"HTTP {response.status}: {text}"
                return True
            self._request_id = self._request_id or response.headers["X-Request-Id"]
            while line := await self._line(response, url):
                self.close_left()
                if self._take(line.rstrip(b"\r\n")):
                    return True
        except TimeoutError:
            # A gateway that wakes up to a closed connection stops a request that nobody else reads.
            self._left.append(response)
            raise
        finally:
            if response not in self._left:
                response.close()
        return False

    def close_left(self) -> None:
        """Another gateway has the request: connections to gateways that stood still are closed."""
        while self._left:
            self._left.pop().close()

    async def _line(self, response: aiohttp.ClientResponse, url: str) -> bytes:
        """The next one; after a silence the gateway is asked whether it lives. Raises TimeoutError when it doesn't."""
        while True:
            try:
                async with asyncio.timeout(SILENCE_S):
                    return await response.content.readline()
            except TimeoutError:
                async with asyncio.timeout(ANSWER_S), self._session.get(f"{url}/health"):
                    pass

    def _request(self, url: str) -> Any:
        question = self._answer.question
        if self._last_event_id:
            headers = {"Last-Event-ID": self._last_event_id}
            return self._session.get(f"{url}/v1/requests/{self._request_id}/events", headers=headers)
        body = {
            "prompt": question.prompt,
            "max_tokens": question.max_tokens,
            "ignore_eos": True,
            "stream": True,
            **question.sampling,
        }
        # Two posts with one key are one request: nothing is asked twice when the answer to the first was lost.
        return self._session.post(
            f"{url}/v1/completions", json=body, headers={"Idempotency-Key": f"chaos-{id(self)}-{question.number}"}
        )

    def _take(self, line: bytes) -> bool:
        """A line; an event counts once its empty line is here. Whether the answer is over."""
        name, _, value = line.partition(b": ")
        if line:
            self._event[name] = value
            return False
        event, self._event = self._event, {}
        self._last_event_id = event.get(b"id", b"").decode() or self._last_event_id
        return b"data" in event and self._read(event[b"data"])

    def _read(self, data: bytes) -> bool:
        if data == b"[DONE]":
            self._answer.completed = True
            return True
        event = json.loads(data)
        if "error" in event:
            self._answer.problem = event["error"]["message"]
            return True
        for choice in event["choices"]:
            if choice["text"]:
                self._answer.add(choice["text"])
            if choice["finish_reason"]:
                self._answer.finishes += 1
        return False
