"""A `tokenizers.Tokenizer` out of a GGUF file's vocabulary, so that it encodes exactly as the original did.

The format names the way text is cut into words (`tokenizer.ggml.pre`) but doesn't describe it; the table below does. A
name that isn't in it is refused: a wrong cut still decodes well and quietly makes every answer worse.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from services.scheduler.model.errors import UnsupportedModelError
from services.scheduler.model.gguf_file import GgufFile

# Tokens that end an answer though a file may name none of them; its one end-of-text token is often not that of a turn.
_ENDS_OF_TURN = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>")

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # token types of the format; 1 is normal, 6 a byte

_CONTRACTIONS_AND_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_SIGNS_AND_SPACES = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _gpt2_words() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _single_digits() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _gpt2_words()])


def _digits_by_three() -> Any:
    return _by_pattern(rf"{_CONTRACTIONS_AND_LETTERS}|\p{{N}}{{1,3}}|{_SIGNS_AND_SPACES}")


def _digits_by_one() -> Any:
    return _by_pattern(rf"{_CONTRACTIONS_AND_LETTERS}|\p{{N}}|{_SIGNS_AND_SPACES}")


def _by_pattern(pattern: str) -> Any:
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


@dataclass(frozen=True, slots=True)
class _ByteLevel:
    """How one `tokenizer.ggml.pre` prepares text for its merges, and whether whole words skip them."""

    words: Callable[[], Any]
    ignore_merges: bool = False
    normalizer: Callable[[], Any] | None = None


_LLAMA3 = _ByteLevel(_digits_by_three, ignore_merges=True)
_BYTE_LEVEL = {
    "gpt-2": _ByteLevel(_gpt2_words),
    "smollm": _ByteLevel(_single_digits),
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "qwen2": _ByteLevel(_digits_by_one, normalizer=normalizers.NFC),
}


def tokenizer_of(gguf: GgufFile) -> Tokenizer:
    """Builds the tokenizer of a GGUF file; raises UnsupportedModelError for a kind it doesn't know."""
    kind = gguf.require("tokenizer.ggml.model")
    if kind == "gpt2":
        tokenizer = _byte_level(gguf)
    elif kind == "llama":
        tokenizer = _sentence_piece(gguf)
    else:
        raise UnsupportedModelError(f"tokenizer.ggml.model is {kind!r}; 'gpt2' and 'llama' are supported")
    _add_special_tokens(tokenizer, gguf)
    return tokenizer


def tokenizer_config(gguf: GgufFile) -> dict[str, Any]:
    """What `tokenizer_config.json` says: the special tokens by name and the chat template."""
    tokens = gguf.require("tokenizer.ggml.tokens")
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {short: gguf.get(f"tokenizer.ggml.{long}_token_id") for short, long in names.items()}
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": int(gguf.require(f"{gguf.get('general.architecture')}.context_length")),
        **{f"{short}_token": tokens[index] for short, index in ids.items() if index is not None},
        "chat_template": gguf.get("tokenizer.chat_template"),
    }


def end_ids(gguf: GgufFile) -> list[int]:
    """The ids that end an answer, ascending: those that the file names, and those that end a turn of a chat."""
    named = {gguf.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")} - {None}
    kinds = gguf.get("tokenizer.ggml.token_type") or []
    tokens = enumerate(zip(gguf.require("tokenizer.ggml.tokens"), kinds, strict=False))
    turns = {index for index, (token, kind) in tokens if kind == _CONTROL and token in _ENDS_OF_TURN}
    return sorted({int(index) for index in named} | turns)


def _byte_level(gguf: GgufFile) -> Tokenizer:
    words = gguf.get("tokenizer.ggml.pre", "gpt-2")
    if words not in _BYTE_LEVEL:
        raise UnsupportedModelError(f"tokenizer.ggml.pre is {words!r}; supported: {', '.join(sorted(_BYTE_LEVEL))}")
    kind = _BYTE_LEVEL[words]
    vocab = {token: index for index, token in enumerate(gguf.require("tokenizer.ggml.tokens"))}
    merges = [tuple(merge.split(" ", 1)) for merge in gguf.require("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=kind.ignore_merges))
    if kind.normalizer is not None:
        tokenizer.normalizer = kind.normalizer()
    tokenizer.pre_tokenizer = kind.words()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = _begin_of_text(gguf, default=False) or processors.ByteLevel(trim_offsets=False)
    return tokenizer


def _sentence_piece(gguf: GgufFile) -> Tokenizer:
    tokens: list[str] = gguf.require("tokenizer.ggml.tokens")
    vocab = {token: index for index, token in enumerate(tokens)}
    merges = _merges_by_score(vocab, gguf.require("tokenizer.ggml.scores"))
    unknown = tokens[gguf.get("tokenizer.ggml.unknown_token_id", 0)]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    prefix = gguf.get("tokenizer.ggml.add_space_prefix", True)
    normal = [normalizers.Prepend("▁")] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*normal, normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)
    if (post_processor := _begin_of_text(gguf, default=True)) is not None:
        tokenizer.post_processor = post_processor
    return tokenizer


def _merges_by_score(vocab: dict[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """The merges that a SentencePiece BPE implies: every split of a piece into two pieces, best score first."""
    merges: list[tuple[float, int, int, str, str]] = []
    for piece, index in vocab.items():
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocab and right in vocab:
                merges.append((-scores[index], vocab[left], vocab[right], left, right))
    return [(left, right) for *_, left, right in sorted(merges)]


def _begin_of_text(gguf: GgufFile, *, default: bool) -> Any | None:
    bos = gguf.get("tokenizer.ggml.bos_token_id")
    if bos is None or not gguf.get("tokenizer.ggml.add_bos_token", default):
        return None
    token = gguf.require("tokenizer.ggml.tokens")[bos]
    return processors.TemplateProcessing(
        single=f"{token} $A", pair=f"{token} $A {token}:1 $B:1", special_tokens=[(token, int(bos))]
    )


def _add_special_tokens(tokenizer: Tokenizer, gguf: GgufFile) -> None:
    kinds = gguf.get("tokenizer.ggml.token_type") or []
    named = list(zip(gguf.require("tokenizer.ggml.tokens"), kinds, strict=False))
    tokenizer.add_special_tokens(
        [AddedToken(token, normalized=False, special=True) for token, kind in named if kind in (_UNKNOWN, _CONTROL)]
    )
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token, kind in named if kind == _USER_DEFINED])
