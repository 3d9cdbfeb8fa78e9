"""What a reader needs to take an answer up again, in this process or, written down, in the next one."""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from binascii import Error as NotBase64
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

from tailrace.v1 import generation_pb2


@dataclass(frozen=True, slots=True)
class Handle:
    """Which answer, the proof that it is yours, and per choice the tokens and code points that you have.

    It is a secret as long as the request lives.
    """

    request_id: str
    resume_token: bytes
    offsets: Sequence[tuple[int, int]]

    def dump(self) -> str:
        """As one line of text."""
        token = b64encode(self.resume_token).decode()
        return json.dumps({"request_id": self.request_id, "resume_token": token, "offsets": self.offsets})

    @classmethod
    def load(cls, text: str) -> Self:
        """What `dump` wrote. Raises ValueError for anything else."""
        try:
            value = json.loads(text)
            token = b64decode(value["resume_token"], validate=True)
            offsets = tuple(_offset(*at) for at in value["offsets"])
            if not (isinstance(value["request_id"], str) and offsets):
                raise ValueError
            return cls(value["request_id"], token, offsets)
        except (ValueError, TypeError, KeyError, NotBase64) as error:
            raise ValueError("this is no handle that was dumped") from error

    def request(self) -> generation_pb2.ResumeRequest:
        """The contract's message."""
        return generation_pb2.ResumeRequest(
            request_id=self.request_id,
            resume_token=self.resume_token,
            offsets=[
                generation_pb2.ChoiceOffset(choice=choice, token_offset=tokens, text_offset=text)
                for choice, (tokens, text) in enumerate(self.offsets)
            ],
        )


def _offset(tokens: Any, text: Any) -> tuple[int, int]:
    if type(tokens) is not int or type(text) is not int or min(tokens, text) < 0 or max(tokens, text) >= 1 << 32:
        raise ValueError
    return tokens, text
