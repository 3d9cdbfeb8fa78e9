"""A server in front of OpenVINO GenAI's continuous batching, as thin as can be. Runs in that package's environment.

python openvino_server.py MODEL PORT
"""

from __future__ import annotations

import asyncio
import json
import queue
import sys
import threading
from typing import Any

import openvino_genai  # type: ignore[import-not-found]  # only there where this runs
from aiohttp import web

CACHE_GB = 2
BATCH_TOKENS_MAX = 512

Body = dict[str, Any]
Out = asyncio.Queue[tuple[str, int] | None]


class Pipeline:
    """The pipeline and the thread that steps it; new text reaches each request's queue on the event loop."""

    def __init__(self, model: str, loop: asyncio.AbstractEventLoop) -> None:
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.cache_size = CACHE_GB
        scheduler.max_num_batched_tokens = BATCH_TOKENS_MAX
        scheduler.enable_prefix_caching = True
        self._pipeline = openvino_genai.ContinuousBatchingPipeline(model, scheduler, "CPU")
        self._tokenizer = self._pipeline.get_tokenizer()
        self._loop = loop
        self._new: queue.SimpleQueue[tuple[Body, Out]] = queue.SimpleQueue()
        self._open: list[tuple[Any, Out]] = []
        self._count = 0
        threading.Thread(target=self._run, daemon=True).start()

    def add(self, body: Body) -> Out:
        """A request; its queue gives (text, number of tokens), and None at the end."""
        out: Out = asyncio.Queue()
        self._new.put((body, out))
        return out

    def _run(self) -> None:
        while True:
            while not self._new.empty() or not self._open:
                self._start(*self._new.get())
            self._pipeline.step()
            self._open = [entry for entry in self._open if self._advance(*entry)]

    def _start(self, body: Body, out: Out) -> None:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = body["max_tokens"]
        config.ignore_eos = bool(body.get("ignore_eos"))
        config.do_sample = False
        if schema := (body.get("response_format") or {}).get("json_schema"):
            config.structured_output_config = openvino_genai.StructuredOutputConfig(
                json_schema=json.dumps(schema["schema"])
            )
        self._count += 1
        self._open.append((self._pipeline.add_request(self._count, body["prompt"], config), out))

    def _advance(self, handle: Any, out: Out) -> bool:
        """Passes on what the step gave; whether more will come."""
        ids = []
        while handle.can_read():
            for output in handle.read().values():
                ids += output.generated_ids
        running: bool = handle.get_status() == openvino_genai.GenerationStatus.RUNNING
        if ids:
            # Text of these ids alone: a character split between steps may look odd, which costs no time.
            self._give(out, (self._tokenizer.decode(ids), len(ids)))
        if not running:
            self._give(out, None)
        return running

    def _give(self, out: Out, item: tuple[str, int] | None) -> None:
        self._loop.call_soon_threadsafe(out.put_nowait, item)


async def serve(model: str, port: int) -> None:
    """Until it is ended."""
    pipeline = Pipeline(model, asyncio.get_running_loop())

    async def health(request: web.Request) -> web.Response:
        return web.Response()

    async def completions(request: web.Request) -> web.StreamResponse:
        out = pipeline.add(await request.json())
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        tokens = 0
        while (item := await out.get()) is not None:
            tokens += item[1]
            await response.write(b"data: " + json.dumps({"choices": [{"text": item[0]}]}).encode() + b"\n\n")
        usage = {"choices": [], "usage": {"completion_tokens": tokens}}
        await response.write(b"data: " + json.dumps(usage).encode() + b"\n\ndata: [DONE]\n\n")
        return response

    app = web.Application()
    app.add_routes([web.get("/health", health), web.post("/v1/completions", completions)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(serve(sys.argv[1], int(sys.argv[2])))
