"""A detokenizer that dies between two tokens of one character, and while it holds back the beginning of a stop text."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tailrace.client import Client, Delta
from tests.chaos.fleet import SERVICES, running

PACE_MS = 150
PROMPT = "🦙 says STOP, 🏴󠁧󠁢󠁷󠁬󠁳󠁿 says STOP; "
STOPS = ["STOP!", "🦙🦙"]
"""Each begins again and again in what is echoed, and never comes whole."""
TOKENS = 90
KILLS = 6


async def test_a_detokenizer_killed_inside_characters_and_stops_gives_the_same_text(
    model_directory: Path, tmp_path: Path
) -> None:
    engine = ("--engine", "fake", "--fake-mode", "echo", "--fake-pace-ms", str(PACE_MS))
    async with (
        running(model_directory, dict.fromkeys(SERVICES, 1), engine, tmp_path) as fleet,
        Client(*fleet.grpc) as client,
    ):
        ids = (await client.tokenize(PROMPT)).token_ids
        echoed = await client.detokenize([ids[position % len(ids)] for position in range(TOKENS)])
        (detokenizer,) = fleet.members["detokenizer"]
        disturbed = asyncio.create_task(_text(client))
        for kill in range(KILLS):
            # At another place between two steps each time, and so, over the characters' 2 to 11 tokens, inside many.
            await asyncio.sleep((1 + kill / KILLS) * PACE_MS / 1000)
            await detokenizer.kill()
            await detokenizer.start()
            await detokenizer.wait_ready()
        assert not disturbed.done()
        assert await disturbed == echoed
        assert not any((await fleet.left_behind()).values())


async def _text(client: Client) -> str:
    stream = client.generate(PROMPT, max_tokens=TOKENS, ignore_eos=True, stop=STOPS)
    return "".join([event.text async for event in stream if isinstance(event, Delta)])
