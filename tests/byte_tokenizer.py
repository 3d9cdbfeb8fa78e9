"""The smallest tokenizer: one id per byte, an end-of-text id, and nothing to learn."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

EOS_ID = 0
BYTE_VOCAB_SIZE = 257

_ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def write_byte_tokenizer(folder: Path) -> Path:
    """Writes tokenizer.json and returns its path."""
    vocab = {"</s>": EOS_ID} | {piece: index + 1 for index, piece in enumerate(_ALPHABET)}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    path = folder / "tokenizer.json"
    tokenizer.save(str(path))
    return path


def byte_ids_of(text: str) -> list[int]:
    """The ids of a text."""
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)
    return [_ALPHABET.index(character) + 1 for piece, _ in pieces for character in piece]


def text_of(ids: Iterable[int]) -> str:
    """The text of ids, up to an end-of-text."""
    pieces = [_ALPHABET[token - 1] for token in ids if token != EOS_ID]
    return str(decoders.ByteLevel().decode(pieces))
