"""Who speaks: the first message of every long-lived stream, and what makes two neighbours unfit for each other."""

from __future__ import annotations

from dataclasses import dataclass

from services.protocol.model_card import ModelCard
from services.runtime import __version__
from tailrace.v1 import common_pb2

PROTOCOL_VERSION = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """One incarnation of a process. Unknown: 0 or empty; what isn't known is not compared."""

    epoch: int
    protocol_version: int = PROTOCOL_VERSION
    software_version: str = __version__
    model_id: str = ""
    tokenizer_digest: bytes = b""
    vocab_size: int = 0
    context_length: int = 0


def hello_of(epoch: int, card: ModelCard | None = None) -> Hello:
    """This process's hello, with the model it serves, if it knows one."""
    if card is None:
        return Hello(epoch=epoch)
    return Hello(
        epoch=epoch,
        model_id=card.model_id,
        tokenizer_digest=card.tokenizer_digest,
        vocab_size=card.vocab_size,
        context_length=card.context_length,
    )


def mismatch(ours: Hello, theirs: Hello) -> str | None:
    """Why two processes must not work together, in words; None when they may."""
    if abs(ours.protocol_version - theirs.protocol_version) > 1:
        return f"protocol version {theirs.protocol_version} is not a neighbour of {ours.protocol_version}"
    if ours.model_id and theirs.model_id and ours.model_id != theirs.model_id:
        return f"it serves model {theirs.model_id!r}, not {ours.model_id!r}"
    if ours.tokenizer_digest and theirs.tokenizer_digest and ours.tokenizer_digest != theirs.tokenizer_digest:
        theirs_short, ours_short = theirs.tokenizer_digest.hex()[:12], ours.tokenizer_digest.hex()[:12]
        return f"its tokenizer.json ({theirs_short}) is not ours ({ours_short})"
    return None


def to_wire(hello: Hello) -> common_pb2.Hello:
    """A Hello message."""
    return common_pb2.Hello(
        epoch=hello.epoch,
        protocol_version=hello.protocol_version,
        software_version=hello.software_version,
        model_id=hello.model_id,
        tokenizer_digest=hello.tokenizer_digest,
        vocab_size=hello.vocab_size,
        context_length=hello.context_length,
    )


def from_wire(pb: common_pb2.Hello) -> Hello:
    """A Hello message, read."""
    return Hello(
        epoch=pb.epoch,
        protocol_version=pb.protocol_version,
        software_version=pb.software_version,
        model_id=pb.model_id,
        tokenizer_digest=pb.tokenizer_digest,
        vocab_size=pb.vocab_size,
        context_length=pb.context_length,
    )
