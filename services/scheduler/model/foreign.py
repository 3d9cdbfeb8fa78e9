"""Any other causal model that transformers can load, run by transformers' own code over our paged attention.

Slower than a native one, and held to a proof: before it serves, it computes a short text in pieces over blocks, and
must give what transformers alone gives for the whole. What keeps a state beside keys and values, or attends in a way
of its own, is refused here rather than served wrong.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from kernels.ops import Ops
from kernels.paged_attention import Span
from services.scheduler.model.config_json import end_ids
from services.scheduler.model.decoder import ForwardBatch
from services.scheduler.model.errors import UnsupportedModelError
from services.scheduler.model.foreign_attention import ForeignAttention
from services.scheduler.model.kv_cache import KvCache

Tensor = torch.Tensor

_PROOF_CHUNKS = (11, 1, 1, 6)  # a prefill, decodes, and a prefill that continues
_PROOF_BLOCK_SIZE = 4
_ERROR_MAX = {torch.float32: 1e-3, torch.float16: 0.05, torch.bfloat16: 0.2}
"""Of the norm of the logits' difference to that of the logits."""

# With these, angles depend on the longest sequence of a batch once it is beyond the original length.
_ROPES_BY_LENGTH = ("dynamic", "longrope")


@dataclass(frozen=True, slots=True, kw_only=True)
class ForeignConfig:
    """What an engine must know of a model; `layers` count, sizes as in `ModelConfig`."""

    architecture: str
    vocab_size: int
    context_length: int
    eos_token_ids: tuple[int, ...]
    layers: tuple[None, ...]
    kv_heads: int
    head_dim: int


class ForeignModel:
    """A loaded model of transformers, as an engine sees any model."""

    def __init__(
        self, model: PreTrainedModel, attention: ForeignAttention, config: ForeignConfig, operations: str
    ) -> None:
        self.config = config
        self.operations = operations
        self.parameters = sum(parameter.numel() for parameter in model.parameters())
        self._model = model
        self._attention = attention
        self._picks_rows = "logits_to_keep" in inspect.signature(model.forward).parameters

    def forward(self, batch: ForwardBatch, cache: KvCache) -> Tensor:
        """Computes all rows, writes their keys and values, and returns logits (logit rows, vocab_size)."""
        keep = {"logits_to_keep": batch.logit_rows} if self._picks_rows else {}
        with self._attention.over(cache, batch.attention_plan):
            logits = _logits(self._model, batch.token_ids, batch.positions, **keep)
        return logits if self._picks_rows else logits.index_select(0, batch.logit_rows)


@torch.inference_mode()
def load_foreign(folder: Path, ops: Ops, *, dtype: torch.dtype, device: torch.device) -> ForeignModel:
    """Loads a folder with transformers and makes it prove itself; raises UnsupportedModelError saying what is wrong."""
    logging.disable_progress_bar()
    model = _loaded(folder, _config(folder), dtype).eval().to(device)
    tokens = _proof_tokens(model)
    expected = _logits(model, tokens, torch.arange(len(tokens), device=device))
    attention = ForeignAttention(ops)
    model.set_attn_implementation(attention.name)
    _logits(model, tokens, torch.arange(len(tokens), device=device))  # shows the attention its layers
    foreign = ForeignModel(
        model, attention, _described(folder, model, attention), f"transformers, attention {ops.name}"
    )
    _prove(foreign, tokens, expected, ops)
    return foreign


def _config(folder: Path) -> PreTrainedConfig:
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise UnsupportedModelError(f"{folder}: transformers can't read config.json: {error}") from error
    if getattr(config, "quantization_config", None) is not None:
        raise UnsupportedModelError(
            "config.json: quantization_config isn't supported; weights must be fp32, bf16 or fp16"
        )
    return config


def _loaded(folder: Path, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    model: PreTrainedModel
    found: dict[str, Any]
    loading: Any = AutoModelForCausalLM.from_pretrained  # typed as if it gave the model alone
    try:
        model, found = loading(
            folder, config=config, dtype=dtype, attn_implementation="eager", use_safetensors=True,
            local_files_only=True, trust_remote_code=False, output_loading_info=True,
        )  # fmt: skip
    except (OSError, ValueError, RuntimeError) as error:
        raise UnsupportedModelError(f"{folder}: transformers can't load it: {error}") from error
    if missing := sorted(found["missing_keys"]):
        raise UnsupportedModelError(f"the weights have no tensor {missing[0]!r} ({len(missing)} are missing)")
    if not model._supports_attention_backend:  # transformers has no public word for it
        raise UnsupportedModelError(f"{type(model).__name__} computes its attention itself, so it can't be paged")
    return model


def _described(folder: Path, model: PreTrainedModel, attention: ForeignAttention) -> ForeignConfig:
    text, layers = model.config.get_text_config(decoder=True), attention.layers
    if len(layers) != text.num_hidden_layers:
        raise UnsupportedModelError(
            f"config.json: num_hidden_layers is {text.num_hidden_layers}, of which {len(layers)} attend through "
            f"transformers' interface; layers with a state of another kind aren't supported"
        )
    if len({layer.kv_heads for layer in layers}) != 1:
        raise UnsupportedModelError("its layers differ in their number of KV heads, which isn't supported")
    return ForeignConfig(
        architecture=type(model).__name__,
        vocab_size=text.vocab_size,
        context_length=_context_length(text),
        eos_token_ids=end_ids(folder),
        layers=(None,) * len(layers),
        kv_heads=layers[0].kv_heads,
        head_dim=max(max(layer.key_dim, layer.value_dim) for layer in layers),
    )


def _context_length(text: PreTrainedConfig) -> int:
    whole = int(text.max_position_embeddings)
    if "chunked_attention" in (getattr(text, "layer_types", None) or ()):
        whole = min(whole, int(text.attention_chunk_size))
    parameters: dict[str, Any] = getattr(text, "rope_parameters", None) or {}
    by_kind_of_layer = [value for value in parameters.values() if isinstance(value, dict)]
    for rope in by_kind_of_layer or [parameters]:
        if rope.get("rope_type") in _ROPES_BY_LENGTH:
            whole = min(whole, int(rope.get("original_max_position_embeddings") or whole))
    return whole


def _proof_tokens(model: PreTrainedModel) -> Tensor:
    size = model.config.get_text_config(decoder=True).vocab_size
    return torch.tensor([(7919 * n * n + 31 * n + 3) % size for n in range(sum(_PROOF_CHUNKS))], device=model.device)


def _logits(model: PreTrainedModel, tokens: Tensor, positions: Tensor, **keep: Tensor) -> Tensor:
    """Of rows (rows,), laid out as one sequence, which only the attention would mind."""
    answer = model(input_ids=tokens.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False, **keep)
    logits: Tensor = answer.logits.squeeze(0)
    return logits


def _prove(model: ForeignModel, tokens: Tensor, expected: Tensor, ops: Ops) -> None:
    blocks = -(-len(tokens) // _PROOF_BLOCK_SIZE)
    cache = KvCache(
        model.config, blocks=blocks, block_size=_PROOF_BLOCK_SIZE, dtype=expected.dtype, device=tokens.device
    )
    start, got = 0, []
    for length in _PROOF_CHUNKS:
        rows = torch.arange(start, start + length, device=tokens.device)
        plan = ops.plan_attention([Span(start, length, range(blocks)[::-1])], _PROOF_BLOCK_SIZE, tokens.device)
        got.append(
            model.forward(ForwardBatch(tokens[rows], rows, plan, torch.arange(length, device=tokens.device)), cache)
        )
        start += length
    error = float((torch.cat(got) - expected).float().norm() / expected.float().norm())
    if not error <= _ERROR_MAX[expected.dtype]:
        raise UnsupportedModelError(
            f"{model.config.architecture} computes something else through paged attention than by itself "
            f"(its logits differ by {error:.2g} of their size), so it isn't served"
        )
