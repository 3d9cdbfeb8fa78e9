"""A family's tokenizer, put into a GGUF file and taken out again, cuts every text as the original does."""

from __future__ import annotations

import json
import random
from pathlib import Path

import gguf
import pytest
from tokenizers import Tokenizer

from services.scheduler.model.gguf_file import GgufFile
from services.scheduler.model.gguf_tokenizer import end_ids, tokenizer_of
from tests.tokenizer_files import needed_tokenizer_file

PHRASES = (
    "Hello, world! It's 2024; we'll see 1,234.56 €.",
    "héllo 你好 😀 العربية हिन्दी १२३ ½ ไทย",
    "def f(x):\n\treturn x**2  # two  spaces\r\n\r\n\r\n  end ",
    "e\u0301 and é, Å and A\u030a, ﬁ",  # composed and not
    "\x00\x01 \ufeff\u200b\ufffd",
    "",
)
WORDS = {"llama3": "llama-bpe", "qwen3": "qwen2"}  # what the format calls their way to cut words
BEGINS = {"llama2": True, "llama3": True, "qwen3": False}


def write_vocabulary(path: Path, family: str) -> Path:
    """What the format keeps of a tokenizer.json: tokens, their kinds, and merges, or scores in their place."""
    original = json.loads(needed_tokenizer_file(family).read_text(encoding="utf-8"))
    ids = {**original["model"]["vocab"], **{token["content"]: token["id"] for token in original["added_tokens"]}}
    special = {token["content"]: token["special"] for token in original["added_tokens"]}
    tokens = [token for token, _ in sorted(ids.items(), key=lambda item: item[1])]
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in original["model"]["merges"]]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_token_list(tokens)
    kinds, unknown = {True: 3, False: 4, None: 1}, original["model"]["unk_token"]
    writer.add_token_types([kinds[special.get(token)] if token != unknown else 2 for token in tokens])
    writer.add_bos_token_id(ids.get("<s>", ids.get("<|begin_of_text|>", 0)))
    writer.add_add_bos_token(BEGINS[family])
    if family in WORDS:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(WORDS[family])
        writer.add_token_merges(
            [merge if isinstance(merge, str) else " ".join(merge) for merge in original["model"]["merges"]]
        )
    else:
        writer.add_tokenizer_model("llama")
        rank = {merge.replace(" ", ""): n for n, merge in reversed(list(enumerate(merges)))}
        writer.add_token_scores([-float(rank.get(token, 1e6)) for token in tokens])
        writer.add_unk_token_id(ids["<unk>"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return path


def some_texts() -> list[str]:
    """What people write, in several scripts, and mixtures that nobody would."""
    generator = random.Random(5)
    alphabet = [
        "a",
        "B",
        "é",
        " ",
        "  ",
        "\n",
        "\t",
        "1",
        "23",
        "'s",
        "'LL",
        "你好",
        "😀",
        "ا",
        "_",
        "-->",
        "\r\n",
        "Å",
    ]
    written = [Path(__file__).read_text(encoding="utf-8"), *PHRASES]
    return [*written, *("".join(generator.choices(alphabet, k=40)) for _ in range(200))]


@pytest.mark.parametrize("family", ["llama2", "qwen3", pytest.param("llama3", marks=pytest.mark.slow)])
def test_a_tokenizer_from_gguf_gives_the_originals_ids_and_text(tmp_path: Path, family: str) -> None:
    original = Tokenizer.from_file(str(needed_tokenizer_file(family)))
    ours = tokenizer_of(GgufFile(write_vocabulary(tmp_path / "vocabulary.gguf", family)))
    begin = ours.encode("").ids
    assert bool(begin) == BEGINS[family]
    for text in some_texts():
        expected = original.encode(text, add_special_tokens=False).ids
        assert ours.encode(text).ids == [*begin, *expected], text
        assert ours.decode(expected) == original.decode(expected)


def test_what_ends_a_turn_ends_an_answer_though_the_file_names_one_end(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "chat.gguf", "llama")
    writer.add_token_list(["<unk>", "<end_of_turn>", "</s>", "<|im_end|>", "hello"])
    writer.add_token_types([2, 3, 3, 1, 1])  # a token of text that only looks like an end is none
    writer.add_eos_token_id(2)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    assert end_ids(GgufFile(tmp_path / "chat.gguf")) == [1, 2]
