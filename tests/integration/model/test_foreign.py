"""Models that are no native family's run through transformers, and compute what they compute there, or are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels.triton_ops import triton_ops
from services.scheduler.engine.api import SamplingSpec
from services.scheduler.engine.settings import TorchEngineConfig
from services.scheduler.engine.torch_engine import load_engine
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

GPT2 = {"config": "GPT2Config", "n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 256}
MIXTRAL = {"config": "MixtralConfig", "num_local_experts": 4, "num_key_value_heads": 2}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 12}
EXPERTS = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1, "n_shared_experts": 1,
    "moe_intermediate_size": 24, "first_k_dense_replace": 1,
}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "GPT 2 (learned positions)": GPT2,
    "GPT NeoX (part of a head is turned)": {"config": "GPTNeoXConfig", "rotary_pct": 0.5},
    "Mixtral (experts)": MIXTRAL,
    "DeepSeek 3 (keys longer than values)": {"config": "DeepseekV3Config", **LATENT, **EXPERTS},
    "Cohere 2 (sliding windows)": {
        "config": "Cohere2Config", "sliding_window": 9, "num_hidden_layers": 4, "pad_token_id": 0
    },
}  # fmt: skip
PROMPT = [(7 * i * i + 3 * i + 1) % VOCAB_SIZE for i in range(70)]


@pytest.mark.parametrize("name", MODELS)
def test_logprobs_equal_transformers(tmp_path: Path, name: str) -> None:
    model = save_small_model(tmp_path, **MODELS[name])
    chunks = [33, 1, 1, 20, 1, 14]
    engine = load_small_engine(tmp_path)
    torch.testing.assert_close(
        engine_logprobs(engine, PROMPT, chunks), expected_logprobs(model, PROMPT, chunks), rtol=1e-4, atol=1e-4
    )
    assert (engine.report.architecture, engine.info.context_length) == (type(model).__name__, 256)
    assert engine.info.eos_token_ids == (2,)
    assert engine.report.operations == "transformers, attention torch"


def test_a_mixed_batch_gives_each_sequence_what_transformers_gives(tmp_path: Path) -> None:
    model = save_small_model(tmp_path, **MODELS["Cohere 2 (sliding windows)"])
    spec = SamplingSpec(seed=0, temperature=0.0)
    jobs = [Job(PROMPT[first : first + length], spec, 9) for first, length in ((0, 30), (3, 1), (20, 11), (40, 8))]
    run(load_small_engine(tmp_path), jobs, batch=3, chunk=7)
    for job in jobs:
        assert job.tokens == expected_greedy(model, job.prompt, 9)


def test_the_triton_kernels_serve_it_too(tmp_path: Path) -> None:
    model = save_small_model(tmp_path, **MODELS["DeepSeek 3 (keys longer than values)"])
    settings = TorchEngineConfig(model=tmp_path, dtype="fp32", device="cpu", kv_tokens=512)
    got = engine_logprobs(load_engine(settings, ops=triton_ops()), PROMPT[:10], [6, 1, 3])
    torch.testing.assert_close(got, expected_logprobs(model, PROMPT[:10], [6, 1, 3]), rtol=1e-4, atol=1e-4)


def test_where_angles_would_depend_on_a_neighbours_length_the_context_ends_before(tmp_path: Path) -> None:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    original = {"rope_parameters": rope, "original_max_position_embeddings": 64}
    save_small_model(tmp_path, config="Phi3Config", pad_token_id=0, **original)
    assert load_small_engine(tmp_path).info.context_length == 64


def test_an_order_that_the_batch_decides_is_refused_where_the_same_bits_are_wanted(tmp_path: Path) -> None:
    save_small_model(tmp_path, **GPT2)
    with pytest.raises(UnsupportedModelError, match="deterministic can't be had for GPT2LMHeadModel"):
        load_small_engine(tmp_path, deterministic=True)


def test_two_models_in_one_process_keep_their_blocks_apart(tmp_path: Path) -> None:
    models = [save_small_model(tmp_path / name, **MODELS[name]) for name in list(MODELS)[:2]]
    engines = [load_small_engine(tmp_path / name) for name in list(MODELS)[:2]]
    for model, engine in zip(models, engines, strict=True):
        got = engine_logprobs(engine, PROMPT, [20, 1])
        torch.testing.assert_close(got, expected_logprobs(model, PROMPT[:21], [20, 1]), rtol=1e-4, atol=1e-4)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "attention of its own": ({"config": "BloomConfig", "n_layer": 2, "n_head": 4}, "BloomForCausalLM computes its"),
    "sinks": (
        {"config": "GptOssConfig", "num_local_experts": 4, "head_dim": 16, "num_key_value_heads": 2},
        "GptOssAttention wants 's_aux'",
    ),
    "attention in chunks": (
        {
            "config": "Llama4TextConfig", "num_local_experts": 2, "head_dim": 8, "attention_chunk_size": 16,
            "intermediate_size_mlp": 32, "pad_token_id": 0,
        },
        "computes something else through paged attention",
    ),
}  # fmt: skip


@pytest.mark.parametrize("why", REFUSED)
def test_what_cannot_be_paged_is_refused_with_its_name(tmp_path: Path, why: str) -> None:
    model, said = REFUSED[why]
    save_small_model(tmp_path, **model)
    with pytest.raises(UnsupportedModelError, match=said):
        load_small_engine(tmp_path)


def test_a_missing_tensor_is_named_and_never_made_up(tmp_path: Path) -> None:
    save_small_model(tmp_path, **GPT2, tie_word_embeddings=True)
    weights = load_file(tmp_path / "model.safetensors")
    del weights["transformer.h.1.mlp.c_fc.weight"]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedModelError, match=r"transformer\.h\.1\.mlp\.c_fc\.weight"):
        load_small_engine(tmp_path)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantization_config"),
        ({"model_type": "nobodys", "architectures": ["NobodysForCausalLM"]}, "nobodys"),
        ({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}, "can't load it"),
    ],
)
def test_a_configuration_that_transformers_cannot_serve_is_refused(
    tmp_path: Path, changes: dict[str, Any], named: str
) -> None:
    save_small_model(tmp_path, **GPT2)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(UnsupportedModelError, match=named):
        load_small_engine(tmp_path)
