"""What every token id says, in bytes: read once from a tokenizer.json, whatever its family."""

from __future__ import annotations

import gc
import json
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Json = dict[str, Any]
Spell = Callable[[str], bytes]
"""Turns a piece, as the vocabulary writes it, into the bytes it stands for."""

_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class UnsupportedTokenizer(Exception):
    """The tokenizer.json turns ids into text in a way that isn't known here; the message names it."""


class UnknownTokenId(Exception):
    """An id that neither the tokenizer nor the model has."""

    def __init__(self, token_id: int) -> None:
        super().__init__(f"token id {token_id} does not exist")
        self.token_id = token_id


@dataclass(frozen=True, slots=True, eq=False)
class Vocabulary:
    """The bytes of every id, and what decoding needs to know about it.

    `pieces` has the bytes by id (none for an id that the model has and the tokenizer doesn't). `special` ids can be
    hidden; the `added` ones, special or not, are literal text. `plain` holds the ids that are nothing but whole
    characters, with their text: most ids, and those for which decoding is a look-up.
    """

    pieces: tuple[bytes, ...] = field(repr=False)
    plain: dict[int, str] = field(repr=False)
    special: frozenset[int] = field(repr=False)
    added: frozenset[int] = field(repr=False)
    strips_first_space: bool

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes of one id. Raises UnknownTokenId."""
        if not 0 <= token_id < len(self.pieces):
            raise UnknownTokenId(token_id)
        return self.pieces[token_id]


def load_vocabulary(path: Path, *, size: int = 0) -> Vocabulary:
    """Reads a tokenizer.json. `size` is the number of ids of the model, which may be padded beyond the tokenizer's.

    Raises UnsupportedTokenizer, naming what isn't known.
    """
    with _collection_paused():
        return parse_vocabulary(json.loads(path.read_bytes()), size=size)


def parse_vocabulary(tokenizer: Json, *, size: int = 0) -> Vocabulary:
    """The same from a tokenizer.json that is already read."""
    spell, strips_first_space = _decoder(tokenizer.get("decoder"))
    added_tokens: list[Json] = tokenizer.get("added_tokens") or []
    ids = _model_pieces(tokenizer.get("model") or {})
    table = {token_id: spell(piece) for piece, token_id in ids}
    for token in added_tokens:
        # One that is a piece of the model as well is spelled as that piece.
        table.setdefault(token["id"], token["content"].encode())
    count = max(size, max(table, default=-1) + 1)
    special = frozenset(token["id"] for token in added_tokens if token["special"])
    return Vocabulary(
        pieces=tuple(table.get(token_id, b"") for token_id in range(count)),
        plain={token_id: text for token_id, text in _texts(table) if token_id not in special},
        special=special,
        added=frozenset(token["id"] for token in added_tokens),
        strips_first_space=strips_first_space,
    )


def _model_pieces(model: Json) -> list[tuple[str, int]]:
    vocabulary = model.get("vocab")
    if isinstance(vocabulary, dict):
        return list(vocabulary.items())
    if isinstance(vocabulary, list):  # Unigram: [piece, score], the id is the place
        return [(piece, token_id) for token_id, (piece, _) in enumerate(vocabulary)]
    raise UnsupportedTokenizer(f"a model of type {model.get('type')!r} without a vocabulary")


def _texts(table: dict[int, bytes]) -> Iterator[tuple[int, str]]:
    for token_id, piece in table.items():
        try:
            text = piece.decode()
        except UnicodeDecodeError:
            continue
        if text:
            yield token_id, text


def _decoder(decoder: Json | None) -> tuple[Spell, bool]:
    """How a piece is spelled, and whether the first space of a text is stripped.

    Steps before Fuse work on one piece, those after it on the whole text, where only its first space may be stripped.
    """
    replacements: list[tuple[str, str]] = []
    spell_bytes: Spell = str.encode
    strips = fused = False
    for step in _steps(decoder):
        match step:
            case {"type": "ByteLevel"} if not fused:
                spell_bytes = _spell_byte_level
            case {"type": "ByteFallback"} if not fused:
                spell_bytes = _spell_byte_fallback
            case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)} if not fused:
                replacements.append((old, new))
            case {"type": "Metaspace", "replacement": str(mark)} if not fused:
                replacements.append((mark, " "))
                strips = _metaspace_strips(step)
            case {"type": "Fuse"}:
                fused = True
            case {"type": "Strip", "content": " ", "start": 1, "stop": 0} if fused:
                strips = True
            case _:
                raise UnsupportedTokenizer(f"decoder step {json.dumps(step, ensure_ascii=False)} is not known")
    return _spelling(replacements, spell_bytes), strips


def _steps(decoder: Json | None) -> list[Json]:
    if decoder is None:
        raise UnsupportedTokenizer("no decoder: it isn't said how pieces become text")
    if decoder.get("type") != "Sequence":
        return [decoder]
    return [step for inner in decoder["decoders"] for step in _steps(inner)]


def _metaspace_strips(step: Json) -> bool:
    """Older files say add_prefix_space, newer ones prepend_scheme."""
    scheme = step.get("prepend_scheme")
    return bool(step.get("add_prefix_space", True)) if scheme is None else scheme != "never"


def _spelling(replacements: list[tuple[str, str]], spell_bytes: Spell) -> Spell:
    def spell(piece: str) -> bytes:
        for old, new in replacements:
            piece = piece.replace(old, new)
        return spell_bytes(piece)

    return spell if replacements else spell_bytes


def _spell_byte_fallback(piece: str) -> bytes:
    byte = _BYTE_PIECE.fullmatch(piece) if piece.startswith("<0x") else None
    return bytes.fromhex(byte[1]) if byte else piece.encode()


def _spell_byte_level(piece: str) -> bytes:
    """GPT-2's alphabet: a character per byte. A piece with any other character is literal text."""
    try:
        return piece.translate(_BYTE_OF_CHARACTER).encode("latin-1")
    except UnicodeEncodeError:
        return piece.encode()


def _byte_alphabet() -> dict[int, int]:
    """Code point → byte: printable bytes stand for themselves, the others follow from U+0100 on, in order.

    A Latin-1 character that stands for no byte goes to one outside Latin-1, so that encoding it fails.
    """
    printable = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    unprintable = [byte for byte in range(256) if byte not in printable]
    moved = {0x100 + place: byte for place, byte in enumerate(unprintable)}
    return {byte: byte for byte in printable} | dict.fromkeys(unprintable, 0xFFFF) | moved


_BYTE_OF_CHARACTER = _byte_alphabet()


@contextmanager
def _collection_paused() -> Iterator[None]:
    """A quarter of a million new objects, none of them garbage: collecting meanwhile doubles the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
