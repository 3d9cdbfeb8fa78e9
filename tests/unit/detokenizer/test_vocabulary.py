"""Whatever a tokenizer.json may say of its decoder: read as its library reads it, or refused by name."""

from __future__ import annotations

from typing import Any

import pytest

from services.text.vocabulary import UnknownTokenId, UnsupportedTokenizer, parse_vocabulary
from tests.unit.detokenizer.small_tokenizers import byte_level, sentence_piece, vocabulary_of


def tokenizer(decoder: dict[str, Any] | None, vocabulary: Any, added: list[dict[str, Any]] | None = None) -> Any:
    return {"model": {"type": "BPE", "vocab": vocabulary}, "decoder": decoder, "added_tokens": added or []}


def sequence(*decoders: dict[str, Any]) -> dict[str, Any]:
    return {"type": "Sequence", "decoders": list(decoders)}


BYTE_LEVEL = {"type": "ByteLevel"}
REPLACE = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
FUSE = {"type": "Fuse"}


def test_every_id_of_a_small_tokenizer_is_what_the_library_says() -> None:
    for library in (byte_level(), sentence_piece()):
        vocabulary = vocabulary_of(library)
        for token_id in range(library.get_vocab_size()):
            text = vocabulary.pieces[token_id].decode(errors="replace")
            stripped = text.removeprefix(" ") if vocabulary.strips_first_space else text
            assert stripped == library.decode([token_id], skip_special_tokens=False)


def test_a_byte_level_decoder_is_found_wherever_it_stands() -> None:
    for decoder in (BYTE_LEVEL, sequence(BYTE_LEVEL, FUSE), sequence(sequence(BYTE_LEVEL))):
        assert parse_vocabulary(tokenizer(decoder, {"Ġa": 0, "æ": 1})).pieces == (b" a", b"\xe6")


def test_a_piece_outside_the_byte_alphabet_is_literal() -> None:
    assert parse_vocabulary(tokenizer(BYTE_LEVEL, {"a b": 0, "世": 1})).pieces == (b"a b", "世".encode())


def test_an_added_token_is_literal_unless_it_is_a_piece_too() -> None:
    added = [
        {"id": 0, "content": "é", "special": False},
        {"id": 1, "content": "Ġé", "special": True},
    ]
    vocabulary = parse_vocabulary(tokenizer(BYTE_LEVEL, {"é": 0}, added))
    assert vocabulary.pieces == (b"\xe9", "Ġé".encode())
    assert (vocabulary.special, vocabulary.added) == (frozenset({1}), frozenset({0, 1}))


def test_metaspace_is_a_space_and_strips_the_first_unless_it_says_never() -> None:
    for prepend, strips in (("always", True), ("first", True), ("never", False)):
        decoder = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": prepend}
        vocabulary = parse_vocabulary(tokenizer(decoder, {"▁a": 0}))
        assert (vocabulary.pieces, vocabulary.strips_first_space) == ((b" a",), strips)
    older = {"type": "Metaspace", "replacement": "▁", "add_prefix_space": False}
    assert not parse_vocabulary(tokenizer(older, {"▁a": 0})).strips_first_space


def test_byte_fallback_reads_bytes_and_nothing_that_only_looks_like_them() -> None:
    pieces = {"<0xEA>": 0, "<0xea>": 1, "<0xEA>a": 2, "<0x0xG>": 3, "<0x1>": 4}
    vocabulary = parse_vocabulary(tokenizer(sequence(REPLACE, {"type": "ByteFallback"}, FUSE), pieces))
    assert vocabulary.pieces == (b"\xea", b"\xea", b"<0xEA>a", b"<0x0xG>", b"<0x1>")


def test_a_unigram_vocabulary_is_numbered_by_its_order() -> None:
    model = tokenizer(sequence(REPLACE, FUSE, STRIP), [["<unk>", 0.0], ["▁a", -1.0]])
    assert parse_vocabulary(model).pieces == (b"<unk>", b" a")


def test_ids_that_only_the_model_has_are_empty_and_others_do_not_exist() -> None:
    vocabulary = parse_vocabulary(tokenizer(BYTE_LEVEL, {"a": 0, "b": 2}), size=4)
    assert vocabulary.pieces == (b"a", b"", b"b", b"")
    for token_id in (-1, 4, 2**63):
        with pytest.raises(UnknownTokenId):
            vocabulary.bytes_of(token_id)


@pytest.mark.parametrize(
    "decoder",
    [
        None,
        {"type": "WordPiece", "prefix": "##", "cleanup": True},
        {"type": "BPEDecoder", "suffix": "</w>"},
        {"type": "CTC", "pad_token": "<pad>"},
        {"type": "Replace", "pattern": {"Regex": "▁+"}, "content": " "},
        sequence(FUSE, REPLACE),
        sequence(STRIP, FUSE),
        sequence(REPLACE, FUSE, {"type": "Strip", "content": " ", "start": 2, "stop": 0}),
        sequence(REPLACE, FUSE, {"type": "Strip", "content": " ", "start": 0, "stop": 1}),
    ],
)
def test_a_decoder_that_is_not_known_is_refused(decoder: dict[str, Any] | None) -> None:
    with pytest.raises(UnsupportedTokenizer, match="decoder"):
        parse_vocabulary(tokenizer(decoder, {"a": 0}))


def test_a_model_without_a_vocabulary_is_refused() -> None:
    with pytest.raises(UnsupportedTokenizer, match="vocabulary"):
        parse_vocabulary({"model": {"type": "Odd"}, "decoder": BYTE_LEVEL})
