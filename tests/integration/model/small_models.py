"""Models of a few thousand random weights, written by transformers, which is then asked what they compute."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from services.scheduler.engine.api import Engine, SamplingSpec, SequenceKey, Slice
from services.scheduler.engine.cpu_engine import CpuEngine, CpuEngineConfig, load_cpu_engine
from services.scheduler.engine.settings import TorchEngineConfig
from services.scheduler.engine.torch_engine import TorchEngine, load_engine

VOCAB_SIZE = 96


def save_small_model(
    folder: Path, *, config: str = "LlamaConfig", max_shard_size: str = "1GB", **changes: Any
) -> PreTrainedModel:
    """Makes a small model of transformers' class `config`, with `changes` to a small Llama 2's, and saves it."""
    torch.manual_seed(7)
    settings = {
        "vocab_size": VOCAB_SIZE,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
        "initializer_range": 0.3,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    settings = getattr(transformers, config)(**settings | changes)
    model = transformers.AutoModelForCausalLM.from_config(settings, attn_implementation="eager").eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "norm" in name:  # which start as zeros and ones, and then hide what they are for
            torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model


def load_small_engine(folder: Path, **settings: Any) -> TorchEngine:
    """An engine over it, with room for 512 tokens in blocks of 4."""
    defaults = {"dtype": "fp32", "device": "cpu", "kv_tokens": 512, "block_size": 4}
    return load_engine(TorchEngineConfig(model=folder, **defaults | settings))


def load_small_cpu_engine(folder: Path, **settings: Any) -> CpuEngine:
    """The same from the step library; in `fp32` unless told otherwise."""
    defaults = {"weights_format": "fp32", "kv_tokens": 512, "block_size": 4, "threads": 2}
    return load_cpu_engine(CpuEngineConfig(model=folder, **defaults | settings))


def engine_logprobs(engine: Engine, ids: Sequence[int], chunks: Sequence[int]) -> torch.Tensor:
    """Log-probabilities (chunks, vocab_size) after each chunk of `ids`, fed in chunks of the given lengths."""
    key, size = SequenceKey(0), engine.info.vocab_size
    engine.open(key, SamplingSpec(seed=0, temperature=0.0, logprobs=size), ids, ())
    rows, start = [], 0
    for length in chunks:
        piece = Slice(key, ids[start : start + length], start, range(5, 5 + 64), True, 0, False)
        answer = engine.step([piece])[0]
        row = torch.empty(size)
        row[torch.tensor(answer.logprobs.top_ids)] = torch.tensor(answer.logprobs.top_logprobs)
        rows.append(row)
        start += length
    engine.close(key)
    return torch.stack(rows)


@torch.inference_mode()
def expected_greedy(model: PreTrainedModel, ids: Sequence[int], tokens: int) -> list[int]:
    """What transformers goes on with, each time from the whole sequence anew."""
    whole = list(ids)
    for _ in range(tokens):
        whole.append(int(model(torch.tensor([whole])).logits[0, -1].argmax()))
    return whole[len(ids) :]


@torch.inference_mode()
def expected_logprobs(model: PreTrainedModel, ids: Sequence[int], chunks: Sequence[int]) -> torch.Tensor:
    """The same from transformers, in one pass."""
    logits = model(torch.tensor([list(ids)])).logits[0]
    ends = torch.tensor(chunks).cumsum(0) - 1
    return logits[ends].float().log_softmax(-1)
