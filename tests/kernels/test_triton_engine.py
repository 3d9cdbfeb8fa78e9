"""Small random models of every native family through the engine: the Triton kernels give the CPU path's ids."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kernels.ops import Ops, reference_ops
from kernels.paged_attention import paged_attention, plan_attention
from kernels.triton_ops import triton_ops
from services.scheduler.engine.api import SamplingSpec
from services.scheduler.engine.operations import choose_ops
from services.scheduler.engine.settings import TorchEngineConfig
from services.scheduler.engine.torch_engine import load_engine
from tests.engine_driver import Job, run
from tests.integration.model.small_models import VOCAB_SIZE, engine_logprobs, save_small_model
from tests.integration.model.test_foreign import MODELS as FOREIGN
from tests.integration.model.test_native import MODELS

pytestmark = pytest.mark.timeout(300)  # the interpreter is slow, and other tests may share its cores

Tensor = torch.Tensor
TOKENS = 8
# One of each that asks something else of the kernels; the others only change what lies between them.
FEW = ["Llama, head_dim of its own", "Mistral 0.1 (sliding window)", "Qwen 2", "Qwen 3", "Gemma", "Gemma 2", "Gemma 3"]


def job(length: int) -> Job:
    prompt = [(7 * i * i + 3 * i + 1) % VOCAB_SIZE for i in range(length)]
    return Job(prompt, SamplingSpec(seed=0, temperature=0.0), TOKENS)


def settings(folder: Path, device: torch.device, **changes: Any) -> TorchEngineConfig:
    defaults = {"device": str(device), "dtype": "fp32", "kv_tokens": 128, "block_size": 4}
    return TorchEngineConfig(model=folder, **defaults | changes)


def ids_by(ops: Ops, folder: Path, device: torch.device, lengths: list[int]) -> list[list[int]]:
    """Greedy ids after prompts of these lengths, in one batch, prefilled in chunks of five."""
    jobs = [job(length) for length in lengths]
    run(load_engine(settings(folder, device), ops=ops), jobs, chunk=5)
    assert all(len(answered.tokens) == TOKENS for answered in jobs)
    return [answered.tokens for answered in jobs]


def compare(name: str, folder: Path, device: torch.device, lengths: list[int]) -> None:
    shape = {"num_hidden_layers": 2, "num_attention_heads": 2}
    shape["num_key_value_heads"] = 1 if MODELS[name].get("num_key_value_heads", 4) < 4 else 2
    save_small_model(folder, **MODELS[name] | shape)
    expected = ids_by(reference_ops(), folder, torch.device("cpu"), lengths)
    assert ids_by(triton_ops(), folder, device, lengths) == expected


@pytest.mark.parametrize("name", FEW)
def test_triton_gives_the_cpu_paths_ids(name: str, tmp_path: Path, device: torch.device) -> None:
    compare(name, tmp_path, device, [8])


def test_triton_gives_the_cpu_paths_ids_in_a_mixed_batch(tmp_path: Path, device: torch.device) -> None:
    compare("Llama 3 (grouped queries, scaled RoPE)", tmp_path, device, [3, 13])


def test_a_model_that_transformers_computes_attends_by_triton_too(tmp_path: Path, device: torch.device) -> None:
    save_small_model(tmp_path, **FOREIGN["DeepSeek 3 (keys longer than values)"])
    expected = ids_by(reference_ops(), tmp_path, torch.device("cpu"), [6])
    assert ids_by(triton_ops(), tmp_path, device, [6]) == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_triton_gives_the_cpu_paths_ids_for_every_config(name: str, tmp_path: Path, device: torch.device) -> None:
    compare(name, tmp_path, device, [3, 13])


def test_an_fp8_cache_is_attended_to_as_what_it_holds(tmp_path: Path, device: torch.device) -> None:
    save_small_model(tmp_path, num_attention_heads=2, num_key_value_heads=1)
    ids = job(6).prompt
    # A position at a time, so that plain PyTorch reads what the cache holds and not the step's own keys.
    wide, narrow, judge = (
        engine_logprobs(load_engine(settings(tmp_path, device, kv_dtype=kv_dtype), ops=ops), ids, [1] * len(ids))
        for ops, kv_dtype in ((triton_ops(), "auto"), (triton_ops(), "fp8"), (widening_ops(), "fp8"))
    )
    torch.testing.assert_close(narrow, judge, rtol=1e-4, atol=1e-4)
    assert (narrow - wide).abs().max() > 0.01


def widening_ops() -> Ops:
    """The same writes, read by plain PyTorch in the step's dtype."""

    def attention(
        query: Tensor, keys: Tensor, values: Tensor, key_cache: Tensor, value_cache: Tensor, plan: Any, **scores: Any
    ) -> Tensor:
        wide_keys, wide_values = key_cache.to(query.dtype), value_cache.to(query.dtype)
        return paged_attention(query, keys, values, wide_keys, wide_values, plan, **scores)

    return replace(triton_ops(), name="triton, attention torch", plan_attention=plan_attention, attention=attention)


@pytest.mark.slow
def test_a_model_that_transformers_computes_keeps_an_fp8_cache_too(tmp_path: Path, device: torch.device) -> None:
    save_small_model(tmp_path, **FOREIGN["DeepSeek 3 (keys longer than values)"])
    engine = load_engine(settings(tmp_path, device, kv_dtype="fp8"), ops=triton_ops())
    short = replace(job(6), max_tokens=2)
    run(engine, [short])
    assert len(short.tokens) == 2
    assert (engine.report.dtype, engine.report.kv_dtype) == ("float32", "float8_e4m3fn")


def test_an_fp8_cache_holds_twice_the_tokens_of_a_16_bit_one(tmp_path: Path, device: torch.device) -> None:
    save_small_model(tmp_path)
    by_memory = {"dtype": "bf16", "kv_tokens": None, "kv_memory_bytes": 1 << 16}
    wide, narrow = (
        load_engine(settings(tmp_path, device, kv_dtype=kv_dtype, **by_memory), ops=triton_ops()).report
        for kv_dtype in ("auto", "fp8")
    )
    assert (narrow.kv_tokens, narrow.kv_bytes) == (2 * wide.kv_tokens, wide.kv_bytes)


def test_a_gpu_gets_the_triton_kernels_and_a_cpu_plain_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert [choose_ops(torch.device(name)).name for name in ("cuda:1", "cpu")] == ["triton", "torch"]
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # an interpreted kernel is right, but no way to serve
    assert choose_ops(torch.device("cuda")).name == "torch"
