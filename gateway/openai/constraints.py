"""What an answer must look like, in OpenAI's form (`response_format`) and in vLLM's (`guided_json` and its like)."""

from __future__ import annotations

import json
from typing import Any

from gateway.openai.json_types import WrongType, shown

_ANY_OBJECT = '{"type": "object"}'


def response_format(value: Any) -> str | None:
    """The JSON schema that it asks for; None for plain text."""
    if not isinstance(value, dict):
        raise WrongType(f"must be an object, not {shown(value)}")
    match value.get("type"):
        case "text":
            return None
        case "json_object":
            return _ANY_OBJECT
        case "json_schema":
            named = value.get("json_schema")
            if not isinstance(named, dict) or not isinstance(named.get("schema"), dict):
                raise WrongType("must hold an object", ".json_schema.schema")
            return json.dumps(named["schema"])
        case other:
            raise WrongType(f"must be text, json_object or json_schema, not {shown(other)}", ".type")


def schema(value: Any) -> str:
    """A JSON schema, as an object or as its text."""
    if not isinstance(value, str | dict):
        raise WrongType(f"must be a JSON schema or its text, not {shown(value)}")
    return value if isinstance(value, str) else json.dumps(value)
