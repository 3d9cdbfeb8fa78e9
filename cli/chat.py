"""`tailrace chat`: a conversation in the terminal, streamed."""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager

from prompt_toolkit import PromptSession
from prompt_toolkit.formatted_text import ANSI

from cli.conversation import Conversation
from cli.exit_code import ExitCode
from cli.sampling_flags import add_sampling_flags, sampling_options
from cli.server_address import add_server_flag, exit_code_of, in_plain_words
from tailrace.client import Client, ClientError, Delta, Finish, FinishReason, Options, Stream, StreamCut

Ask = Callable[[], Awaitable[str]]


def main(argv: Sequence[str]) -> int:
    """Talks until Ctrl-D."""
    options = _parser().parse_args(argv)
    conversation = Conversation(system=options.system)
    return asyncio.run(_chat(options.server, conversation, sampling_options(options)))


async def _chat(server: str, conversation: Conversation, options: Options) -> int:
    async with Client(server) as client:
        try:
            models = await client.list_models()
        except ClientError as error:
            print(f"tailrace chat: {in_plain_words(error, server)}", file=sys.stderr)
            return exit_code_of(error)
        print(f"{models[0].model_id} at {server}; /help lists commands, Ctrl-D leaves")
        session: PromptSession[str] = PromptSession(message=ANSI("\x1b[1;36m› \x1b[0m"))
        await converse(client, conversation, options, session.prompt_async)
    return ExitCode.OK


async def converse(client: Client, conversation: Conversation, options: Options, ask: Ask) -> None:
    """Reads lines with `ask` until it raises EOFError, and answers each; KeyboardInterrupt drops the line."""
    while True:
        try:
            line = (await ask()).strip()
        except KeyboardInterrupt:
            continue
        except EOFError:
            return
        if line == "/quit":
            return
        if line.startswith("/"):
            print(conversation.command(line))
        elif line:
            await _answer(client, conversation, options, line)


async def _answer(client: Client, conversation: Conversation, options: Options, question: str) -> None:
    stream = client.chat(conversation.ask(question), **options)
    pieces: list[str] = []
    try:
        with _interrupt_stops(stream):
            async for event in stream:
                match event:
                    case Delta(text=text):
                        pieces.append(text)
                        print(text, end="", flush=True)
                    case Finish(reason=reason) if reason is not FinishReason.STOP:
                        print(f" [{reason.name.lower()}{': ' + event.error if event.error else ''}]", end="")
                    case _:
                        pass
        print()
    except StreamCut as cut:
        print(f" [{cut}]")
    except ClientError as error:
        print(in_plain_words(error, client.addresses[0]))
        return
    if pieces:
        conversation.keep(question, "".join(pieces))


@contextmanager
def _interrupt_stops(stream: Stream) -> Iterator[None]:
    """Inside it, Ctrl-C stops the answer and not the program."""
    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, stream.cancel)
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="tailrace chat", description="Talks with the model; /help inside it.")
    parser.add_argument("--system", default="", metavar="TEXT", help="what the model is told before everything else")
    add_server_flag(parser)
    add_sampling_flags(parser)
    return parser
