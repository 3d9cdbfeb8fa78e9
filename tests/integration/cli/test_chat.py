"""`tailrace chat` and `tailrace generate` against a server that sends what a test tells it to."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Sequence

import pytest

from cli.chat import converse
from cli.conversation import Conversation
from cli.exit_code import ExitCode
from cli.generate import main as generate
from tailrace.client import Client, Options
from tests.integration.client.servicer import WHOLE, ScriptedServer, serving


@pytest.fixture
async def server() -> AsyncIterator[ScriptedServer]:
    async with serving() as scripted:
        yield scripted


class Typist:
    """Types lines and then Ctrl-D; an exception among the lines is raised in its place."""

    def __init__(self, lines: Sequence[str | type[BaseException]]) -> None:
        self._lines = iter(lines)

    async def ask(self) -> str:
        line = next(self._lines, EOFError)
        if isinstance(line, str):
            return line
        raise line


async def talk(server: ScriptedServer, *lines: str | type[BaseException]) -> Conversation:
    conversation = Conversation()
    async with Client(server.address) as client:
        await converse(client, conversation, Options(), Typist(lines).ask)
    return conversation


async def test_an_answer_is_shown_and_remembered_for_the_next_question(
    server: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    await talk(server, "hello", "again")
    assert capsys.readouterr().out.count("hé🙂") == 2
    first, second = server.requests
    assert len(first.messages) == 1
    assert [message.content for message in second.messages] == ["hello", "hé🙂", "again"]


async def test_ctrl_c_stops_the_answer_and_not_the_program(
    server: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.script, server.hangs = WHOLE[:2], True
    talking = asyncio.create_task(talk(server, "hello", "/help"))
    await asyncio.wait_for(server.called.wait(), 20)
    os.kill(os.getpid(), signal.SIGINT)
    conversation = await asyncio.wait_for(talking, 20)
    await asyncio.wait_for(server.caller_left.wait(), 20)
    assert "/reset" in capsys.readouterr().out
    assert [turn["content"] for turn in conversation.turns] in ([], ["hello", "hé"])


async def test_ctrl_c_at_the_prompt_drops_the_line(server: ScriptedServer) -> None:
    await talk(server, KeyboardInterrupt, "hello")
    assert len(server.requests) == 1


async def test_a_refused_question_is_explained_and_not_remembered(
    server: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.script = []
    assert (await talk(server, "hello")).turns == []
    assert "not whole" in capsys.readouterr().out


async def test_generate_writes_the_answer_and_nothing_else(
    server: ScriptedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    code = await asyncio.to_thread(generate, ["a prompt", "--server", server.address, "--max-tokens", "5"])
    assert code == ExitCode.OK
    assert capsys.readouterr().out == "hé🙂\n"
    (request,) = server.requests
    assert request.options.stopping.max_tokens == 5


async def test_generate_of_a_cut_answer_fails(server: ScriptedServer, capsys: pytest.CaptureFixture[str]) -> None:
    server.script = WHOLE[:3]
    assert await asyncio.to_thread(generate, ["a prompt", "--server", server.address]) == ExitCode.FAILED
    assert "not whole" in capsys.readouterr().err
