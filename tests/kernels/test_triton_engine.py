"""Small random models of every native family through the engine: the Triton kernels give the CPU path's ids."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kernels.ops import Ops, reference_ops
from kernels.triton_ops import triton_ops
from services.scheduler.engine.api import SamplingSpec
from services.scheduler.engine.operations import choose_ops
from services.scheduler.engine.settings import TorchEngineConfig
from services.scheduler.engine.torch_engine import load_engine
from tests.engine_driver import Job, run
from tests.integration.model.small_models import VOCAB_SIZE, save_small_model
from tests.integration.model.test_foreign import MODELS as FOREIGN
from tests.integration.model.test_native import MODELS

pytestmark = pytest.mark.timeout(300)  # the interpreter is slow, and other tests may share its cores

TOKENS = 8
# One of each that asks something else of the kernels; the others only change what lies between them.
FEW = ["Llama, head_dim of its own", "Mistral 0.1 (sliding window)", "Qwen 2", "Qwen 3", "Gemma", "Gemma 2", "Gemma 3"]


def job(length: int) -> Job:
    prompt = [(7 * i * i + 3 * i + 1) % VOCAB_SIZE for i in range(length)]
    return Job(prompt, SamplingSpec(seed=0, temperature=0.0), TOKENS)


def ids_by(ops: Ops, folder: Path, device: torch.device, lengths: list[int]) -> list[list[int]]:
    """Greedy ids after prompts of these lengths, in one batch, prefilled in chunks of five."""
    settings = TorchEngineConfig(model=folder, device=str(device), dtype="fp32", kv_tokens=128, block_size=4)
    jobs = [job(length) for length in lengths]
    run(load_engine(settings, ops=ops), jobs, chunk=5)
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


def test_a_gpu_gets_the_triton_kernels_and_a_cpu_plain_pytorch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    assert [choose_ops(torch.device(name)).name for name in ("cuda:1", "cpu")] == ["triton", "torch"]
    monkeypatch.setenv("TRITON_INTERPRET", "1")  # an interpreted kernel is right, but no way to serve
    assert choose_ops(torch.device("cuda")).name == "torch"
