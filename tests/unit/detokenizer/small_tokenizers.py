"""Small tokenizers of both families, made by the tokenizers library itself, with everything odd in them."""

from __future__ import annotations

import json
from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from services.text.vocabulary import Vocabulary, parse_vocabulary

WORDS = (
    "the",
    " the",
    " quick",
    " br",
    "own",
    " fox",
    "\n",
    "\n\n",
    "five",
    " five",
    " ",
    "  ",
    "é",
    "世",
    "🙂",
    "ก",
    "\u0301",
)
SPECIAL = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")
ADDED = ("<think>", "</think>", "ünï cöde", "<0xEA>!")


@cache
def byte_level(words: tuple[str, ...] = WORDS) -> Tokenizer:
    """A byte-level vocabulary: 256 bytes, some words."""
    alphabet = {character: place for place, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    spell = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    vocabulary = dict(alphabet)
    for word in words:
        (piece, _), *_ = spell.pre_tokenize_str(word)
        vocabulary.setdefault(piece, len(vocabulary))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = spell
    tokenizer.decoder = decoders.ByteLevel()
    return _with_added(tokenizer)


@cache
def sentence_piece() -> Tokenizer:
    """A vocabulary in the manner of SentencePiece: ▁ for a space, bytes as <0x00>, a text's first space stripped."""
    vocabulary = {"<unk>": 0}
    for byte in range(256):
        vocabulary[f"<0x{byte:02X}>"] = len(vocabulary)
    for word in WORDS:
        vocabulary.setdefault(word.replace(" ", "▁"), len(vocabulary))
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return _with_added(tokenizer)


def _with_added(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_special_tokens([AddedToken(content, normalized=False) for content in SPECIAL])
    tokenizer.add_tokens([AddedToken(content, normalized=False) for content in ADDED])
    return tokenizer


@cache
def vocabulary_of(tokenizer: Tokenizer) -> Vocabulary:
    """The tokenizer as the detokenizer reads it; one more id that only the model has."""
    return parse_vocabulary(json.loads(tokenizer.to_str()), size=tokenizer.get_vocab_size() + 1)


def byte_ids(tokenizer: Tokenizer, data: bytes) -> list[int]:
    """One token per byte."""
    if isinstance(tokenizer.decoder, decoders.ByteLevel):
        pieces = vocabulary_of(tokenizer).pieces
        return [pieces.index(bytes([byte])) for byte in data]
    ids = tokenizer.get_vocab()
    return [ids[f"<0x{byte:02X}>"] for byte in data]
