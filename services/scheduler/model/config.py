"""An architecture as data: everything in which one decoder-only model differs from another, and no more.

`config_json.py` reads it, `families.py` knows what each family leaves unsaid; the decoder and the CPU's step library
are written against this file alone and know no family.
"""

from __future__ import annotations

from collections.abc import Mapping, Sized
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol


class Activation(Enum):
    """What the gate of the feed-forward layer goes through."""

    SILU = "silu"
    GELU_TANH = "gelu_tanh"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rope:
    """How fast the pairs of a head turn; `scaling` is None or holds `rope_type` (linear, llama3, yarn) and its keys."""

    theta: float
    scaling: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerConfig:
    """What differs between the layers of one model.

    `window` is how many positions a row sees, its own included; None sees all of them.
    """

    window: int | None
    rope: Rope


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes in values (`hidden_size`, `head_dim`), tokens (`vocab_size`, `context_length`) or counts.

    A layer computes, where N are RMSNorms with weights `norm_offset` + w:

        h += A(attention(N(h)))          A is N under `sandwich_norms`, nothing otherwise
        h += M(feed_forward(N(h)))       M likewise

    Scores are `attention_scale` * q·k, and under `attention_soft_cap` c they become c * tanh(score / c); so do logits
    under theirs. With `qk_norm` each head's query and key are normalised before they are turned. `embedding_scale`
    multiplies the embeddings, not the head that may be tied to them. `dtype` is the one the weights are stored in, as
    torch calls it ("float32"); `architecture` is for reports.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    context_length: int
    layers: tuple[LayerConfig, ...]
    norm_eps: float
    norm_offset: float
    sandwich_norms: bool
    qk_norm: bool
    qkv_bias: bool
    attention_out_bias: bool
    mlp_bias: bool
    activation: Activation
    attention_scale: float
    attention_soft_cap: float | None
    logit_soft_cap: float | None
    embedding_scale: float
    tied_head: bool
    dtype: str
    eos_token_ids: tuple[int, ...]


class Described(Protocol):
    """What an engine must know of any model, native or not; sizes as in `ModelConfig`."""

    @property
    def architecture(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def context_length(self) -> int: ...
    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...
    @property
    def layers(self) -> Sized: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
