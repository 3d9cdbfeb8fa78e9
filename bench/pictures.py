"""Makes the pictures of `tailrace top`, `trace` and `doctor` in docs/pictures from a real run with the embedded model.

python -m bench.pictures
"""

from __future__ import annotations

import asyncio
import io
import os
import re
import signal
from pathlib import Path

from rich.console import Console, RenderableType

from bench.services_under_test import Stack, running
from cli import doctor, top, trace
from cli.loop import Loop
from cli.model_source import model_directory
from tailrace.client import Client

OUT = Path("docs/pictures")
WIDTH = 112
REQUESTS = 14
LIVE, ENDED = "story-6", "story-12"
FONT_FROM_ELSEWHERE = re.compile(r"\s*@font-face \{.*?\}", re.DOTALL)


def main() -> None:
    """Runs, and writes four files."""
    asyncio.run(_draw())


async def _draw() -> None:
    async with (
        running(model_directory(None), "--kv-tokens", "2048", fake_engine=False) as stack,
        Client(stack.grpc) as client,
        Loop(list(stack.admin.items())) as loop,
    ):
        asking = []
        for number in range(REQUESTS):
            asking.append(asyncio.create_task(_ask(client, number)))
            await asyncio.sleep(0.15)
        await asyncio.sleep(4)
        before = await loop.look()
        await asyncio.sleep(1)
        _save("top", top.picture(before, await loop.look()), "tailrace top")
        await _save_trace(loop, LIVE, "trace")
        await _save_doctor(stack)
        await asyncio.gather(*asking)
        await _save_trace(loop, ENDED, "trace-ended")


async def _ask(client: Client, number: int) -> None:
    prompt = f"Tell me a story about a tailrace and the number {number}. " * 3
    await client.generate(prompt, max_tokens=160, ignore_eos=True, request_id=f"story-{number}").whole()


async def _save_doctor(stack: Stack) -> None:
    """While the detokenizer is stopped."""
    os.kill(stack.pids["detokenizer"], signal.SIGSTOP)
    await asyncio.sleep(1)
    diagnosis = await doctor.examine(list(stack.admin.items()))
    os.kill(stack.pids["detokenizer"], signal.SIGCONT)
    console = _console()
    doctor.show(diagnosis, console)
    _write("doctor", console, "tailrace doctor, its detokenizer being stopped")


async def _save_trace(loop: Loop, request_id: str, name: str) -> None:
    flows = (await loop.find(request_id)).flows().values()
    _save(name, trace.picture(next(flow for flow in flows if flow.name == request_id)), f"tailrace trace {request_id}")


def _save(name: str, picture: RenderableType, title: str) -> None:
    console = _console()
    console.print(picture)
    _write(name, console, title)


def _console() -> Console:
    return Console(
        record=True, width=WIDTH, file=io.StringIO(), highlight=False, force_terminal=True, color_system="truecolor"
    )


def _write(name: str, console: Console, title: str) -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / f"{name}.svg").write_text(FONT_FROM_ELSEWHERE.sub("", console.export_svg(title=title)), encoding="utf-8")


if __name__ == "__main__":
    main()
