"""Which configurations are taken, and that a refusal names the key."""

from __future__ import annotations

from typing import Any

import pytest

from services.scheduler.model.config import LayerConfig, Rope
from services.scheduler.model.config_json import parse_config
from services.scheduler.model.errors import UnsupportedModelError

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def test_defaults_are_those_of_llama_1() -> None:
    config = parse_config(LLAMA)
    assert (config.kv_heads, config.head_dim, config.context_length) == (4, 16, 2048)
    assert config.norm_eps == 1e-6
    assert (config.tied_head, config.qkv_bias, config.attention_out_bias, config.mlp_bias) == (False,) * 4
    assert config.layers == (LayerConfig(window=None, rope=Rope(theta=10000.0)),) * 2


def test_both_ways_to_write_rope_mean_the_same() -> None:
    scaling = {"rope_type": "linear", "factor": 2.0}
    old = parse_config({**LLAMA, "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}})
    new = parse_config({**LLAMA, "rope_parameters": {"rope_theta": 5e5, **scaling}})
    for rope in (old.layers[0].rope, new.layers[0].rope):
        assert rope.theta == 5e5
        assert rope.scaling is not None
        assert scaling.items() <= rope.scaling.items()


def test_one_or_several_end_of_text_ids() -> None:
    assert parse_config({**LLAMA, "eos_token_id": 2}).eos_token_ids == (2,)
    assert parse_config({**LLAMA, "eos_token_id": [2, 7]}).eos_token_ids == (2, 7)
    assert parse_config(LLAMA).eos_token_ids == ()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["MixtralForCausalLM"]}, "MixtralForCausalLM"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"sliding_window": 4096}, "sliding_window"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"pretraining_tp": 2}, "pretraining_tp"),
        ({"rope_interleaved": True}, "rope_interleaved"),
        ({"num_experts": 8}, "num_experts"),
        ({"hidden_size": None}, "hidden_size"),
        ({"rms_norm_eps": None}, "rms_norm_eps"),
        ({"rope_theta": "10000"}, "rope_theta"),
        ({"rope_scaling": "linear"}, "rope_scaling"),
        ({"rope_parameters": {"rope_theta": -1}}, "rope_parameters.rope_theta"),
        ({"eos_token_id": ["</s>"]}, "eos_token_id"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "mscale": 1.0}}, "mscale"),
    ],
)
def test_refusal_names_the_key(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UnsupportedModelError, match=named):
        parse_config(LLAMA | changes)
