"""docs/inputs.md, line by line, against a running system."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import grpc.aio
from google.protobuf import json_format

from tailrace.client import Client, InvalidRequest, Refused
from tailrace.client.wire import read_error
from tailrace.v1 import generation_pb2, generation_pb2_grpc
from tests.stack import Stack

DOCUMENT = Path(__file__).resolve().parents[2] / "docs/inputs.md"
ABSENT = "–"
COLUMNS = 7
REPEATED = re.compile(r'"(\S+) × (\d+)"')


@dataclass(frozen=True)
class Line:
    """One line of the table."""

    name: str
    grpc: str
    http: str
    answer: str
    grpc_field: str
    http_param: str


def lines() -> Iterator[Line]:
    for row in DOCUMENT.read_text("utf-8").splitlines():
        cells = [cell.strip().strip("`") for cell in row.split("|")]
        if len(cells) == COLUMNS + 2 and cells[1] != "Input" and not cells[1].startswith("-"):
            yield Line(*cells[1:7])


def spelled_out(cell: str) -> str:
    """The cell with every `"x × n"` as the list that it stands for; x is a number or a text."""

    def repeat(match: re.Match[str]) -> str:
        item, count = match.groups()
        return json.dumps([json.loads(item) if item.isdecimal() else item] * int(count))

    return REPEATED.sub(repeat, cell)


def generate_request(cell: str) -> generation_pb2.GenerateRequest:
    request = generation_pb2.GenerateRequest()
    json_format.ParseDict(json.loads(spelled_out(cell)), request)
    if request.WhichOneof("prompt") is None:
        request.text = "The river"
    if "maxTokens" not in cell:
        request.options.stopping.max_tokens = 4
    return request


def completion_body(cell: str, model: str) -> str:
    """The cell's JSON with what else a request needs; text, since much of it is no JSON on purpose."""
    if not cell.startswith("{"):
        return cell
    rest = {"model": model, "prompt": "The river", "max_tokens": 4}
    missing = [f"{json.dumps(name)}: {json.dumps(value)}" for name, value in rest.items() if f'"{name}"' not in cell]
    return spelled_out("{" + ", ".join([*missing, cell[1:]]))


async def over_grpc(stub: generation_pb2_grpc.GenerationServiceAsyncStub, line: Line) -> str:
    """What went wrong; "" when all is as the line says."""
    try:
        events = [event async for event in stub.Generate(generate_request(line.grpc))]
    except grpc.aio.AioRpcError as failed:
        error = read_error(failed)
        got = error.code if isinstance(error, Refused) else type(error).__name__
        field = error.field if isinstance(error, InvalidRequest) else ""
        return compare(line, "gRPC", got, field, line.answer.partition(" / ")[0], line.grpc_field)
    whole = events[-1].HasField("completed")
    return compare(line, "gRPC", "accepted" if whole else "cut", "", line.answer.partition(" / ")[0], line.grpc_field)


async def over_http(session: aiohttp.ClientSession, stack: Stack, line: Line) -> str:
    expected = "200" if line.answer == "accepted" else line.answer.partition(" / ")[2]
    body = completion_body(line.http, stack.model)
    async with session.post(
        f"{stack.url}/v1/completions", data=body.encode(), headers={"Content-Type": "application/json"}
    ) as response:
        answer: dict[str, Any] = await response.json()
    param = "" if response.status == 200 else answer["error"]["param"] or ""
    return compare(line, "HTTP", str(response.status), param, expected, line.http_param)


def compare(line: Line, side: str, got: str, field: str, expected: str, expected_field: str) -> str:
    if (got, field) == (expected, expected_field):
        return ""
    return f"{line.name} ({side}): {got} {field!r}, not {expected} {expected_field!r}"


def test_the_table_is_there_and_every_line_says_something_of_each_side() -> None:
    table = list(lines())
    assert len(table) > 40
    assert all(line.grpc != ABSENT or line.http != ABSENT for line in table)
    assert {line.answer for line in table} == {"accepted", "INVALID_ARGUMENT / 400", "NOT_FOUND / 404"}


async def test_every_odd_input_is_answered_as_documented_and_disturbs_no_neighbour(
    stack: Stack, client: Client
) -> None:
    neighbour = asyncio.create_task(client.generate("Neighbour", max_tokens=2000, seed=1, ignore_eos=True).whole())
    expected = client.generate("Neighbour", max_tokens=2000, seed=1, ignore_eos=True)
    wrong = []
    async with grpc.aio.insecure_channel(stack.grpc) as channel, aiohttp.ClientSession() as session:
        stub: generation_pb2_grpc.GenerationServiceAsyncStub = generation_pb2_grpc.GenerationServiceStub(channel)
        for line in lines():
            wrong += [await over_grpc(stub, line)] if line.grpc != ABSENT else []
            wrong += [await over_http(session, stack, line)] if line.http != ABSENT else []
    assert [problem for problem in wrong if problem] == []
    assert (await neighbour).choices == (await expected.whole()).choices
    await stack.wait_idle()
