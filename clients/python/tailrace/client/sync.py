"""The same client for code without an event loop: one thread runs the loop, calls and streams block.

from tailrace.client.sync import Client

with Client("127.0.0.1:7000") as client:
    for event in client.generate("Once upon a time", max_tokens=32):
        ...
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

from tailrace.client.client import Client as AsyncClient
from tailrace.client.events import AbortOutcome, Answer, Event, Model, Tokens
from tailrace.client.handle import Handle
from tailrace.client.options import Message, Options
from tailrace.client.stream import Stream as AsyncStream

T = TypeVar("T")


class Client:
    """`tailrace.client.Client`, blocking; may be used from several threads."""

    def __init__(
        self, *addresses: str, api_key: str | None = None, timeout_s: float = 10.0, resume_for_s: float = 30.0
    ) -> None:
        self._loop = _LoopThread()
        self._client = self._loop.run(
            _make(*addresses, api_key=api_key, timeout_s=timeout_s, resume_for_s=resume_for_s)
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the connection, its open streams and the thread."""
        self._loop.run(self._client.close())
        self._loop.stop()

    def generate(self, prompt: str | Sequence[int], **options: Unpack[Options]) -> Stream:
        """The continuation of a text or of ids."""
        return Stream(self._loop, self._client.generate(prompt, **options))

    def chat(self, messages: Iterable[Message], **options: Unpack[Options]) -> Stream:
        """The next turn of a conversation."""
        return Stream(self._loop, self._client.chat(messages, **options))

    def resume(self, handle: Handle) -> Stream:
        """The rest of an answer after a stream's `handle`."""
        return Stream(self._loop, self._client.resume(handle))

    def abort(self, request_id: str, *, wait_until_released: bool = False) -> AbortOutcome:
        """Stops a request by its id."""
        return self._loop.run(self._client.abort(request_id, wait_until_released=wait_until_released))

    def tokenize(self, text: str | Iterable[Message], *, add_special_tokens: bool = True) -> Tokens:
        """The ids of a text or of a conversation."""
        return self._loop.run(self._client.tokenize(text, add_special_tokens=add_special_tokens))

    def detokenize(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of ids."""
        return self._loop.run(self._client.detokenize(token_ids, skip_special_tokens=skip_special_tokens))

    def list_models(self) -> list[Model]:
        """The models that can be named in a request."""
        return self._loop.run(self._client.list_models())


class Stream:
    """`tailrace.client.Stream`, blocking."""

    def __init__(self, loop: _LoopThread, stream: AsyncStream) -> None:
        self._loop = loop
        self._stream = stream

    def __iter__(self) -> Iterator[Event]:
        events = self._stream.__aiter__()
        try:
            while (event := self._loop.run(_next(events))) is not None:
                yield event
        finally:
            self.cancel()

    @property
    def handle(self) -> Handle | None:
        """What `Client.resume` needs to go on after the last event that was read; None before Started."""
        return self._stream.handle

    def cancel(self) -> None:
        """Leaves the request; harmless after its end."""
        self._loop.call(self._stream.cancel)

    def whole(self) -> Answer:
        """The joined answer."""
        return self._loop.run(self._stream.whole())

    def text(self) -> str:
        """The text of the only (or first) choice."""
        return self._loop.run(self._stream.text())

    def texts(self) -> list[str]:
        """The text of every choice."""
        return self._loop.run(self._stream.texts())


class _LoopThread:
    """An event loop on a thread of its own."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="tailrace-client", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs a coroutine there and waits for its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def call(self, function: Any) -> None:
        """Calls a function there, soon; nothing happens when the loop is closed."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(function)

    def stop(self) -> None:
        """Ends the loop and the thread."""
        self.run(self._loop.shutdown_asyncgens())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _make(*addresses: str, **settings: Any) -> AsyncClient:
    return AsyncClient(*addresses, **settings)  # a channel must be made inside its loop


async def _next(events: Any) -> Event | None:
    return await anext(events, None)
