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
from services.scheduler.model.export import export, main
from services.scheduler.model.exported_folder import save_weights
from services.scheduler.model.gguf_file import GgufFile
from services.scheduler.model.torch_weights import open_weights
from tests.integration.model.gguf_files import VOCABULARY, convert, write_small_llama
from tests.integration.model.small_models import (
    engine_logprobs,
    expected_logprobs,
    load_small_engine,
    save_small_model,
)

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def embedded_tokenizer(model_directory: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model_directory / "tokenizer.json"))


def test_exported_folder_loads_and_runs(tmp_path: Path) -> None:
    export(write_small_llama(tmp_path / "small.gguf"), tmp_path / "out")
    engine = load_small_engine(tmp_path / "out")
    assert engine.info.eos_token_ids == (2,)
    assert engine_logprobs(engine, [1, 3, 4, 5], [4]).isfinite().all()
    assert Tokenizer.from_file(str(tmp_path / "out/tokenizer.json")).encode("ab a").tokens == ["ab", "Ġa"]


GEMMA = {"head_dim": 16, "num_key_value_heads": 1, "pad_token_id": 0, "tie_word_embeddings": True}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": {"num_key_value_heads": 2, "attention_bias": True},
    "Mistral": {"config": "MistralConfig", "num_key_value_heads": 2, "sliding_window": None},
    "Qwen 2": {"config": "Qwen2Config", "num_key_value_heads": 2, "tie_word_embeddings": True},
    "Qwen 3": {"config": "Qwen3Config", "num_key_value_heads": 2, "head_dim": 16},
    "Gemma": {"config": "GemmaConfig", **GEMMA},
    "Gemma 2": {
        "config": "Gemma2Config", "query_pre_attn_scalar": 16, "sliding_window": 9, "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 3.0, **GEMMA,
    },
    "Gemma 3": {
        "config": "Gemma3TextConfig", "query_pre_attn_scalar": 16, "sliding_window": 9, "num_hidden_layers": 7, **GEMMA
    },
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("weights", ["fp32", "link"])
def test_a_model_converted_to_gguf_computes_what_it_did(tmp_path: Path, family: str, weights: str) -> None:
    model = save_small_model(tmp_path / "original", **FAMILIES[family])
    export(convert(model, tmp_path / "small.gguf"), tmp_path / "out", weights=weights)
    prompt, chunks = [(7 * i * i + 3 * i + 1) % 96 for i in range(40)], [20, 1, 19]
    got = engine_logprobs(load_small_engine(tmp_path / "out"), prompt, chunks)
    torch.testing.assert_close(got, expected_logprobs(model, prompt, chunks), rtol=1e-4, atol=1e-4)


def test_a_linked_folder_holds_no_weights_and_follows_a_changed_file(tmp_path: Path) -> None:
    source, out = write_small_llama(tmp_path / "small.gguf"), tmp_path / "out"
    assert export(source, out, weights="link")
    assert (out / "model.gguf").resolve() == source
    assert not export(source, out, weights="link")
    write_small_llama(source, words="smollm")
    assert export(source, out, weights="link")


def test_rotary_pairs_are_half_a_head_apart_after_export(tmp_path: Path) -> None:
    path = write_small_llama(tmp_path / "small.gguf")
    export(path, tmp_path / "out")
    stored = next(t for t in gguf.GGUFReader(path).tensors if t.name == "blk.0.attn_k.weight").data
    with open_weights(tmp_path / "out", torch.float32, CPU) as weights:
        exported = weights.take("model.layers.0.self_attn.k_proj.weight", 8, 16)
    # One head of 8: the file holds its pairs as 0 1 | 2 3 | …, the folder as 0 2 4 6 | 1 3 5 7.
    torch.testing.assert_close(exported, torch.tensor(stored[[0, 2, 4, 6, 1, 3, 5, 7]]))


def test_up_to_date_folder_is_left_alone_and_a_changed_source_is_not(tmp_path: Path) -> None:
    source, out = write_small_llama(tmp_path / "small.gguf"), tmp_path / "out"
    assert export(source, out)
    written = (out / "config.json").stat().st_mtime_ns
    assert not export(source, out)
    assert (out / "config.json").stat().st_mtime_ns == written
    assert export(source, out, weights="bf16")
    assert read_config(out).dtype == "bfloat16"


@pytest.mark.parametrize(
    ("broken", "named"),
    [
        ({"architecture": "phi3"}, "phi3"),
        ({"words": "tekken"}, "tekken"),
        ({"drop": "embedding_length"}, "embedding_length"),
        ({"drop": "token_embd.weight"}, "token_embd.weight"),
        ({"blk.0.ffn_gate_exps.weight": (24, 16)}, "ffn_gate_exps"),
    ],
)
def test_refusal_names_the_cause_and_leaves_the_old_folder(
    tmp_path: Path, broken: dict[str, Any], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    export(write_small_llama(tmp_path / "small.gguf"), out)
    before = sorted(path.name for path in tmp_path.iterdir())
    assert main(["--gguf", str(write_small_llama(tmp_path / "broken.gguf", **broken)), "--out", str(out)]) == 1
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


def test_a_file_cut_anywhere_is_refused_as_gguf(tmp_path: Path) -> None:
    whole = write_small_llama(tmp_path / "small.gguf").read_bytes()
    for length in [*range(0, 400, 7), *range(400, len(whole), 997), len(whole) - 1]:
        cut = tmp_path / "cut.gguf"
        cut.write_bytes(whole[:length])
        with pytest.raises(UnsupportedModelError, match=r"cut\.gguf can't be read as GGUF"):
            GgufFile(cut)


def test_dequantised_values_are_those_of_the_package(tmp_path: Path) -> None:
    values = np.random.default_rng(1).standard_normal((6, 64)).astype(np.float32)
    kinds = (gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.F16)
    writer = gguf.GGUFWriter(tmp_path / "packed.gguf", "llama")
    for kind in kinds:
        writer.add_tensor(kind.name, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    tensors = GgufFile(tmp_path / "packed.gguf").tensors
    for kind in kinds:
        expected = gguf.dequantize(gguf.quantize(values, kind), kind)
        np.testing.assert_array_equal(tensors[kind.name].dequantised(), expected)
