"""`tailrace generate PROMPT`: a continuation on standard output, as it is generated."""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence

from cli.exit_code import ExitCode
from cli.sampling_flags import add_sampling_flags, sampling_options
from cli.server_address import add_server_flag, exit_code_of, in_plain_words
from tailrace.client import Client, ClientError, Delta, Finish, FinishReason, Options


def main(argv: Sequence[str]) -> int:
    """Streams one answer; exit code 0 only when it came whole and ended by a stop or a limit."""
    parser = _parser()
    options = parser.parse_args(argv)
    prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
    return asyncio.run(_generate(options.server, prompt, sampling_options(options)))


async def _generate(server: str, prompt: str, options: Options) -> int:
    try:
        async with Client(server) as client, client.generate(prompt, **options) as stream:
            code = ExitCode.OK
            async for event in stream:
                match event:
                    case Delta(text=text):
                        sys.stdout.write(text)
                        sys.stdout.flush()
                    case Finish():
                        code = _end(event)
                    case _:
                        pass
            return code
    except ClientError as error:
        print(f"\ntailrace generate: {in_plain_words(error, server)}", file=sys.stderr)
        return exit_code_of(error)


def _end(finish: Finish) -> ExitCode:
    print()
    if finish.reason in (FinishReason.STOP, FinishReason.LENGTH):
        return ExitCode.OK
    print(f"tailrace generate: ended with {finish.reason.name}: {finish.error or 'not whole'}", file=sys.stderr)
    return ExitCode.FAILED


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tailrace generate",
        description="Continues a prompt. Exit codes: 0 a whole answer, 1 refused or cut, 2 usage, 3 no server.",
    )
    parser.add_argument("prompt", metavar="PROMPT", help="the text to continue; - reads standard input")
    add_server_flag(parser)
    add_sampling_flags(parser)
    return parser
