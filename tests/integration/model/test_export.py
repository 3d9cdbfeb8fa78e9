"""The export from GGUF: what it writes, when it writes, what it refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from services.scheduler.model.config_json import read_config
from services.scheduler.model.errors import UnsupportedModelError
from services.scheduler.model.export import export, main, save_weights
from services.scheduler.model.weights import open_weights
from tests.integration.model.small_models import engine_logprobs, load_small_engine

CPU = torch.device("cpu")
VOCABULARY = ["<unk>", "<s>", "</s>", *(chr(ord("a") + i) for i in range(26)), "Ġ", "ab", "Ġa"]
MERGES = ["a b", "Ġ a"]


def write_gguf(path: Path, *, architecture: str = "llama", words: str = "gpt-2", drop: str = "", **extra: Any) -> Path:
    """A Llama of one layer with random weights; `drop` names a metadata key to leave out."""
    generator = np.random.default_rng(3)
    writer = gguf.GGUFWriter(path, architecture)
    numbers = {"block_count": 1, "context_length": 64, "embedding_length": 16, "feed_forward_length": 24}
    for key, value in {**numbers, "attention.head_count": 2, "attention.head_count_kv": 1}.items():
        if key != drop:
            writer.add_uint32(f"{architecture}.{key}", value)
    writer.add_float32(f"{architecture}.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(words)
    writer.add_token_list(VOCABULARY)
    writer.add_token_types([2, 3, 3, *[1] * (len(VOCABULARY) - 3)])
    writer.add_token_merges(MERGES)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    shapes = {
        "token_embd.weight": (len(VOCABULARY), 16),
        "output_norm.weight": (16,),
        "blk.0.attn_norm.weight": (16,),
        "blk.0.attn_q.weight": (16, 16),
        "blk.0.attn_k.weight": (8, 16),
        "blk.0.attn_v.weight": (8, 16),
        "blk.0.attn_output.weight": (16, 16),
        "blk.0.ffn_norm.weight": (16,),
        "blk.0.ffn_gate.weight": (24, 16),
        "blk.0.ffn_up.weight": (24, 16),
        "blk.0.ffn_down.weight": (16, 24),
        **extra,
    }
    for name, shape in shapes.items():
        writer.add_tensor(name, generator.standard_normal(shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def embedded_tokenizer(model_directory: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model_directory / "tokenizer.json"))


def test_exported_folder_loads_and_runs(tmp_path: Path) -> None:
    export(write_gguf(tmp_path / "small.gguf"), tmp_path / "out")
    engine = load_small_engine(tmp_path / "out")
    assert engine.info.eos_token_ids == (2,)
    assert engine_logprobs(engine, [1, 3, 4, 5], [4]).isfinite().all()
    assert Tokenizer.from_file(str(tmp_path / "out/tokenizer.json")).encode("ab a").tokens == ["ab", "Ġa"]


def test_rotary_pairs_are_half_a_head_apart_after_export(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "small.gguf")
    export(path, tmp_path / "out")
    stored = next(t for t in gguf.GGUFReader(path).tensors if t.name == "blk.0.attn_k.weight").data
    with open_weights(tmp_path / "out", torch.float32, CPU) as weights:
        exported = weights.take("model.layers.0.self_attn.k_proj.weight", 8, 16)
    # One head of 8: the file holds its pairs as 0 1 | 2 3 | …, the folder as 0 2 4 6 | 1 3 5 7.
    torch.testing.assert_close(exported, torch.tensor(stored[[0, 2, 4, 6, 1, 3, 5, 7]]))


def test_up_to_date_folder_is_left_alone_and_a_changed_source_is_not(tmp_path: Path) -> None:
    source, out = write_gguf(tmp_path / "small.gguf"), tmp_path / "out"
    assert export(source, out)
    written = (out / "config.json").stat().st_mtime_ns
    assert not export(source, out)
    assert (out / "config.json").stat().st_mtime_ns == written
    assert export(source, out, dtype="bf16")
    assert read_config(out).dtype == "bfloat16"


@pytest.mark.parametrize(
    ("broken", "named"),
    [
        ({"architecture": "gemma3"}, "gemma3"),
        ({"words": "tekken"}, "tekken"),
        ({"drop": "embedding_length"}, "embedding_length"),
        ({"blk.0.ffn_gate_exps.weight": (24, 16)}, "ffn_gate_exps"),
    ],
)
def test_refusal_names_the_cause_and_leaves_the_old_folder(
    tmp_path: Path, broken: dict[str, Any], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    export(write_gguf(tmp_path / "small.gguf"), out)
    before = sorted(path.name for path in tmp_path.iterdir())
    assert main(["--gguf", str(write_gguf(tmp_path / "broken.gguf", **broken)), "--out", str(out)]) == 1
    assert named in capsys.readouterr().err
    assert load_small_engine(out).info.vocab_size == len(VOCABULARY)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([*before, "broken.gguf"])


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    (tmp_path / "text.gguf").write_text("hello")
    with pytest.raises(UnsupportedModelError, match="GGUF"):
        export(tmp_path / "text.gguf", tmp_path / "out")


def test_large_weights_are_written_in_shards_that_load(tmp_path: Path) -> None:
    tensors = {f"t{i}": torch.full((10, 10), float(i)) for i in range(5)}
    save_weights(tensors.items(), tmp_path, torch.float32, shard_bytes_max=900)
    assert len(list(tmp_path.glob("model-*.safetensors"))) == 3
    with open_weights(tmp_path, torch.float32, CPU) as weights:
        for name, tensor in tensors.items():
            assert torch.equal(weights.take(name, 10, 10), tensor)
        weights.finish()


def test_embedded_model_ends_with_im_end_and_keeps_its_chat_template(model_directory: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model_directory)
    assert read_config(model_directory).eos_token_ids == (2,)
    assert tokenizer.convert_ids_to_tokens([0, 1, 2]) == ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    config = json.loads((model_directory / "tokenizer_config.json").read_text())
    assert config["chat_template"] == (model_directory / "chat_template.jinja").read_text()


@pytest.mark.parametrize(
    ("text", "tokens"),
    [
        ("Hello, world", ["Hello", ",", "Ġworld"]),
        ("In 2024", ["In", "Ġ", "2", "0", "2", "4"]),
        ("<|im_start|>user", ["<|im_start|>", "user"]),
    ],
)
def test_embedded_tokenizer_cuts_words_as_the_original(
    embedded_tokenizer: Tokenizer, text: str, tokens: list[str]
) -> None:
    assert embedded_tokenizer.encode(text).tokens == tokens


@pytest.mark.parametrize(
    "text", ["  two  spaces\n\n\ttab", "héllo 你好 😀 العربية", "x = 3.14159e-10;\r\n", "१२३ ½", "\x00"]
)
def test_embedded_tokenizer_round_trips(embedded_tokenizer: Tokenizer, text: str) -> None:
    assert embedded_tokenizer.decode(embedded_tokenizer.encode(text).ids) == text
