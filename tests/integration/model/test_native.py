"""Small random models of every native family compute what transformers computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from services.scheduler.engine.api import SamplingSpec
from services.scheduler.model.errors import UnsupportedModelError
from tests.engine_driver import Job, run
from tests.integration.model.small_models import (
    VOCAB_SIZE,
    engine_logprobs,
    expected_greedy,
    expected_logprobs,
    load_small_engine,
    save_small_model,
)

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
LINEAR_ROPE = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}
GEMMA = {"head_dim": 16, "num_key_value_heads": 1, "pad_token_id": 0}
SLIDING = {"sliding_window": 9, "num_hidden_layers": 4}
MODELS: dict[str, dict[str, Any]] = {
    "Llama 2": {},
    "Llama 3 (grouped queries, scaled RoPE)": {"num_key_value_heads": 2, "rope_parameters": LLAMA3_ROPE},
    "Llama, one KV head": {"num_key_value_heads": 1},
    "Llama, tied head": {"tie_word_embeddings": True},
    "Llama, linear RoPE": {"rope_parameters": LINEAR_ROPE},
    "Llama, YaRN": {"rope_parameters": YARN_ROPE},
    "Llama, attention bias": {"attention_bias": True},
    "Llama, feed-forward bias": {"mlp_bias": True},
    "Llama, head_dim of its own": {"head_dim": 12},
    "Llama, another epsilon": {"rms_norm_eps": 0.1},
    "Mistral 0.1 (sliding window)": {"config": "MistralConfig", "num_key_value_heads": 2, "sliding_window": 9},
    "Mistral 0.3": {"config": "MistralConfig", "sliding_window": None, "head_dim": 12},
    "Qwen 2": {"config": "Qwen2Config", "num_key_value_heads": 2, "tie_word_embeddings": True},
    "Qwen 2.5, YaRN": {"config": "Qwen2Config", "rope_parameters": YARN_ROPE},
    "Qwen 2, sliding upper layers": {
        "config": "Qwen2Config", "use_sliding_window": True, "max_window_layers": 2, **SLIDING
    },
    "Qwen 3": {"config": "Qwen3Config", "num_key_value_heads": 2, "head_dim": 16},
    "Qwen 3, attention bias": {"config": "Qwen3Config", "head_dim": 16, "attention_bias": True},
    "Gemma": {"config": "GemmaConfig", "tie_word_embeddings": True, **GEMMA},
    "Gemma 2": {
        "config": "Gemma2Config", "query_pre_attn_scalar": 20, "tie_word_embeddings": True,
        "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, **SLIDING, **GEMMA,
    },
    "Gemma 3": {
        "config": "Gemma3TextConfig", "query_pre_attn_scalar": 20, "tie_word_embeddings": True,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
        **GEMMA, "sliding_window": 9, "num_hidden_layers": 7,
    },
}  # fmt: skip
PROMPT = [(7 * i * i + 3 * i + 1) % VOCAB_SIZE for i in range(70)]


@pytest.mark.parametrize("name", MODELS)
def test_logprobs_equal_transformers(tmp_path: Path, name: str) -> None:
    # Prefill, decodes and a chunk; the windows of 9 are passed by each of them.
    model = save_small_model(tmp_path, **MODELS[name])
    chunks = [33, 1, 1, 20, 1, 14]
    got = engine_logprobs(load_small_engine(tmp_path), PROMPT, chunks)
    torch.testing.assert_close(got, expected_logprobs(model, PROMPT, chunks), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["Llama 3 (grouped queries, scaled RoPE)", "Mistral 0.1 (sliding window)", "Gemma 3"])
def test_a_mixed_batch_gives_each_sequence_what_transformers_gives(tmp_path: Path, name: str) -> None:
    model = save_small_model(tmp_path, **MODELS[name])
    spec = SamplingSpec(seed=0, temperature=0.0)
    jobs = [Job(PROMPT[first : first + length], spec, 9) for first, length in ((0, 30), (3, 1), (20, 11), (40, 8))]
    run(load_small_engine(tmp_path), jobs, batch=3, chunk=7)
    for job in jobs:
        assert job.tokens == expected_greedy(model, job.prompt, 9)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("name", ["Llama 2", "Qwen 3", "Gemma 3"])
def test_sixteen_bit_logprobs_are_close(tmp_path: Path, dtype: str, name: str) -> None:
    model = save_small_model(tmp_path, **MODELS[name] | {"initializer_range": 0.1})
    got = engine_logprobs(load_small_engine(tmp_path, dtype=dtype), PROMPT, [64, 1, 1])
    assert (got - expected_logprobs(model, PROMPT, [64, 1, 1])).abs().max() < 0.15


def test_sharded_files_load_through_their_index(tmp_path: Path) -> None:
    model = save_small_model(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    got = engine_logprobs(load_small_engine(tmp_path), PROMPT, [70])
    torch.testing.assert_close(got, expected_logprobs(model, PROMPT, [70]), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("first", [1, 3, 4, 5, 8, 31])
def test_chunked_prefill_equals_whole_prefill(tmp_path: Path, first: int) -> None:
    save_small_model(tmp_path, num_key_value_heads=2)
    engine = load_small_engine(tmp_path)
    whole = engine_logprobs(engine, PROMPT, [70])
    torch.testing.assert_close(engine_logprobs(engine, PROMPT, [first, 70 - first])[-1:], whole, rtol=1e-4, atol=1e-4)


def test_report_tells_capacity(tmp_path: Path) -> None:
    save_small_model(tmp_path)
    report = load_small_engine(tmp_path, kv_tokens=None, kv_memory_bytes=1 << 16).report
    per_token = 2 * 2 * 4 * 8 * 4  # keys and values, layers, heads, head_dim, bytes
    assert (report.architecture, report.dtype, report.device) == ("LlamaForCausalLM", "float32", "cpu")
    assert report.kv_tokens == (1 << 16) // per_token // 4 * 4
    assert report.kv_bytes == report.kv_tokens * per_token
    assert report.context_length == 256


def test_context_beyond_the_models_own_is_refused(tmp_path: Path) -> None:
    save_small_model(tmp_path)
    with pytest.raises(UnsupportedModelError, match="context_length 257"):
        load_small_engine(tmp_path, context_length=257)


def test_missing_tensor_is_named(tmp_path: Path) -> None:
    save_small_model(tmp_path, tie_word_embeddings=True)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"tie_word_embeddings": true', '"tie_word_embeddings": false'))
    with pytest.raises(UnsupportedModelError, match=r"lm_head\.weight"):
        load_small_engine(tmp_path)


def test_leftover_tensors_are_refused(tmp_path: Path) -> None:
    save_small_model(tmp_path, attention_bias=True)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"attention_bias": true', '"attention_bias": false'))
    with pytest.raises(UnsupportedModelError, match="bias"):
        load_small_engine(tmp_path)


def test_misshapen_tensor_is_named(tmp_path: Path) -> None:
    save_small_model(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"intermediate_size": 48', '"intermediate_size": 40'))
    with pytest.raises(UnsupportedModelError, match="gate_proj"):
        load_small_engine(tmp_path)


def test_folder_without_weights_is_refused(tmp_path: Path) -> None:
    save_small_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(UnsupportedModelError, match=r"neither model\.safetensors"):
        load_small_engine(tmp_path)


def test_truncated_weights_are_refused(tmp_path: Path) -> None:
    save_small_model(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(UnsupportedModelError, match="can't be read"):
        load_small_engine(tmp_path)
