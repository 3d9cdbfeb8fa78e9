"""Reads a request's body: bounded in size and time, and JSON in the strict sense."""

from __future__ import annotations

import asyncio
from typing import Any

import orjson
from aiohttp import web

from gateway.openai.errors import BodyTimeout, TooLarge
from gateway.openai.json_types import shown
from services.runtime.errors import InvalidRequest


async def read_body(http: web.Request, *, timeout_s: float, max_bytes: int) -> dict[str, Any]:
    """The body as an object. Raises InvalidRequest, TooLarge or BodyTimeout.

    JSON as RFC 8259 has it: no NaN, Infinity or number beyond a double, no lone surrogate, UTF-8 without a byte order
    mark, at most 1,024 levels. Of two equal keys the last one counts.
    """
    try:
        async with asyncio.timeout(timeout_s):
            raw = await http.read()
    except TimeoutError:
        raise BodyTimeout(f"the body did not arrive within {timeout_s:g} s") from None
    except web.HTTPRequestEntityTooLarge:
        raise TooLarge(f"the body is larger than the {max_bytes} bytes that are taken") from None
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise InvalidRequest("", f"the body is not JSON: {error}", reason="INVALID_JSON") from None
    if not isinstance(body, dict):
        raise InvalidRequest("", f"the body must be a JSON object, not {shown(body)}", reason="INVALID_JSON")
    return body
