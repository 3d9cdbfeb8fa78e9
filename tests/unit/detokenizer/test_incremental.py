"""Bytes to characters, against the table of well-formed sequences: all of them that can tell a difference."""

from __future__ import annotations

from itertools import product

import pytest

from services.text.incremental import IncrementalDecoder
from services.text.vocabulary import Vocabulary
from tests.unit.detokenizer.oracle import read_utf8

# The first and last byte of every row and column of the table, and their neighbours.
EDGES = bytes.fromhex("00 41 7f 80 8f 90 9f a0 bf c0 c1 c2 df e0 e1 ec ed ee ef f0 f1 f3 f4 f5 ff")
FEWER = bytes.fromhex("41 80 8f 90 9f a0 bf e0 ed f0 f3 f4 ff")
SINGLE_BYTES = Vocabulary(
    pieces=tuple(bytes([byte]) for byte in range(256)),
    plain={byte: chr(byte) for byte in range(128)},
    special=frozenset(),
    added=frozenset(),
    strips_first_space=False,
)


def decoder() -> IncrementalDecoder:
    return IncrementalDecoder(
        SINGLE_BYTES, skip_special_tokens=True, spaces_between_special_tokens=False, begins_text=False
    )


@pytest.mark.parametrize(("length", "alphabet"), [(1, range(256)), (2, range(256)), (3, EDGES), (4, FEWER)])
def test_each_byte_gives_at_once_what_is_certain_and_the_end_one_replacement(length: int, alphabet: bytes) -> None:
    for data in map(bytes, product(alphabet, repeat=length)):
        tested, text = decoder(), ""
        for byte in data:
            text += tested.push(byte)
        assert (text, tested.incomplete) == read_utf8(data), data.hex(" ")
        assert text + tested.finish() == data.decode("utf-8", "replace"), data.hex(" ")
