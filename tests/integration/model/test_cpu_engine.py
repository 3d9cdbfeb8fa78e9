"""The step library inside its engine: every family, every format, and the same bits whoever is computed beside."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from services.scheduler.engine.api import Sampled, SamplingSpec
from services.scheduler.model.errors import UnsupportedModelError
from tests.engine_driver import Job, run
from tests.integration.model.small_models import (
    VOCAB_SIZE,
    engine_logprobs,
    expected_logprobs,
    load_small_cpu_engine,
    save_small_model,
)
from tests.integration.model.test_native import MODELS, PROMPT
from tests.step_library import needs_step_library

pytestmark = needs_step_library

FORMATS = ["fp32", "bf16", "int8", "int4"]
CHUNKS = [33, 1, 1, 20, 1, 14]


@pytest.mark.parametrize("name", MODELS)
def test_exact_logprobs_equal_transformers(tmp_path: Path, name: str) -> None:
    model = save_small_model(tmp_path, **MODELS[name])
    got = engine_logprobs(load_small_cpu_engine(tmp_path), PROMPT, CHUNKS)
    torch.testing.assert_close(got, expected_logprobs(model, PROMPT, CHUNKS), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kernels", ["generic", "generic_wide"])
@pytest.mark.parametrize("name", ["Llama 3 (grouped queries, scaled RoPE)", "Gemma 2", "Qwen 3, attention bias"])
def test_any_cpu_computes_the_same(tmp_path: Path, name: str, kernels: str) -> None:
    model = save_small_model(tmp_path, **MODELS[name])
    got = engine_logprobs(load_small_cpu_engine(tmp_path, kernels=kernels), PROMPT, CHUNKS)
    torch.testing.assert_close(got, expected_logprobs(model, PROMPT, CHUNKS), rtol=1e-4, atol=1e-4)
    for weights_format in FORMATS[1:]:
        engines = (load_small_cpu_engine(tmp_path, weights_format=weights_format, kernels=k) for k in (kernels, ""))
        got, best = (engine_logprobs(engine, PROMPT, CHUNKS) for engine in engines)
        # Inputs that int4 rounds to 8 bits may be rounded the other way where others added up fp32 in another order.
        most = 0.1 if weights_format == "int4" else 1e-3
        torch.testing.assert_close(got, best, rtol=1e-3, atol=most)


@pytest.mark.parametrize("block_size", [1, 3, 16, 100])
@pytest.mark.parametrize("weights_format", FORMATS)
def test_the_size_of_blocks_changes_nothing(tmp_path: Path, weights_format: str, block_size: int) -> None:
    save_small_model(tmp_path, num_key_value_heads=2)
    usual = load_small_cpu_engine(tmp_path, weights_format=weights_format)
    other = load_small_cpu_engine(tmp_path, weights_format=weights_format, block_size=block_size, kv_tokens=7000)
    expected = engine_logprobs(usual, PROMPT[:60], [60])
    torch.testing.assert_close(engine_logprobs(other, PROMPT[:60], [60]), expected, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize(("weights_format", "most"), [("bf16", 0.1), ("int8", 0.2), ("int4", 1.5)])
@pytest.mark.parametrize("name", ["Llama 3 (grouped queries, scaled RoPE)", "Gemma 3", "Qwen 3", "Mistral 0.3"])
def test_logprobs_of_rounded_weights_are_close(tmp_path: Path, name: str, weights_format: str, most: float) -> None:
    model = save_small_model(tmp_path, **MODELS[name] | {"initializer_range": 0.1})
    got = engine_logprobs(load_small_cpu_engine(tmp_path, weights_format=weights_format), PROMPT, CHUNKS)
    assert (got - expected_logprobs(model, PROMPT, CHUNKS)).abs().max() < most


@pytest.mark.parametrize("name", ["Llama 3 (grouped queries, scaled RoPE)", "Gemma 3", "Qwen 3, attention bias"])
def test_a_bf16_checkpoint_loses_no_bit_as_bf16(tmp_path: Path, name: str) -> None:
    save_small_model(tmp_path, **MODELS[name]).bfloat16().save_pretrained(tmp_path)
    rounded, exact = (load_small_cpu_engine(tmp_path, weights_format=each) for each in ("bf16", "fp32"))
    assert torch.equal(engine_logprobs(rounded, PROMPT, CHUNKS), engine_logprobs(exact, PROMPT, CHUNKS))
    assert rounded.report.weight_bytes < 0.6 * exact.report.weight_bytes


@pytest.mark.parametrize("weights_format", FORMATS)
def test_a_checkpoint_that_needs_no_widening_is_packed_as_if_widened(tmp_path: Path, weights_format: str) -> None:
    model = save_small_model(tmp_path / "bf16").bfloat16()
    model.save_pretrained(tmp_path / "bf16")
    model.float().save_pretrained(tmp_path / "fp32")
    engines = (load_small_cpu_engine(tmp_path / each, weights_format=weights_format) for each in ("bf16", "fp32"))
    stored, widened = (engine_logprobs(engine, PROMPT, CHUNKS) for engine in engines)
    assert torch.equal(stored, widened)


@pytest.mark.parametrize("weights_format", FORMATS)
def test_a_sequence_gets_the_same_bits_alone_in_any_batch_and_in_any_chunks(
    tmp_path: Path, weights_format: str
) -> None:
    save_small_model(tmp_path, num_key_value_heads=2, sliding_window=None)
    engine = load_small_cpu_engine(tmp_path, weights_format=weights_format, kv_tokens=4096)

    def jobs() -> list[Job]:
        spec = SamplingSpec(seed=3, temperature=0.0, logprobs=VOCAB_SIZE)
        return [Job(PROMPT[: 3 + 9 * number % 67], spec, 6) for number in range(14)]

    alone, together, chunked = jobs(), jobs(), jobs()
    for job in alone:
        run(engine, [job])
    run(engine, together)
    run(engine, chunked, batch=5, chunk=7)
    for one, other, third in zip(alone, together, chunked, strict=True):
        assert one.answers == _keyed(other.answers, one) == _keyed(third.answers, one)


def _keyed(answers: list[Sampled], job: Job) -> list[Sampled]:
    return [Sampled(job.key, answer.token_id, answer.logprobs) for answer in answers]


@pytest.mark.parametrize("threads", [1, 3])
def test_threads_change_no_bit(tmp_path: Path, threads: int) -> None:
    save_small_model(tmp_path)
    engines = [load_small_cpu_engine(tmp_path, weights_format="int8", threads=count) for count in (2, threads)]
    first, second = (engine_logprobs(engine, PROMPT, [60, 1, 9]) for engine in engines)
    assert torch.equal(first, second)


@pytest.mark.parametrize("weights_format", FORMATS)
def test_greedy_ids_are_the_same_with_and_without_logprobs(tmp_path: Path, weights_format: str) -> None:
    # Without them the library's own search for the largest logit answers, with them the sampler.
    save_small_model(tmp_path)
    engine = load_small_cpu_engine(tmp_path, weights_format=weights_format)
    plain, told = (Job(PROMPT[:9], SamplingSpec(seed=0, temperature=0.0, logprobs=logs), 20) for logs in (None, 1))
    drawn = Job(PROMPT[:9], SamplingSpec(seed=5, repetition_penalty=1.2), 20)
    run(engine, [plain, drawn, told])
    assert plain.tokens == told.tokens
    alone = Job(PROMPT[:9], SamplingSpec(seed=5, repetition_penalty=1.2), 20)
    run(engine, [alone])
    assert alone.tokens == drawn.tokens


@pytest.mark.parametrize(("weights_format", "kv_format"), [("int8", "int8"), ("int4", "int8"), ("bf16", "fp32")])
def test_report_tells_what_is_stored_how(tmp_path: Path, weights_format: str, kv_format: str) -> None:
    save_small_model(tmp_path)
    report = load_small_cpu_engine(tmp_path, weights_format=weights_format).report
    assert (report.architecture, report.weights_format, report.threads) == ("LlamaForCausalLM", weights_format, 2)
    assert (report.kv_format, report.kv_tokens) == (kv_format, 512)
    assert report.parameters > 10_000


def test_a_head_too_wide_for_the_library_is_refused(tmp_path: Path) -> None:
    save_small_model(tmp_path, head_dim=258)
    with pytest.raises(UnsupportedModelError, match="head_dim 258"):
        load_small_cpu_engine(tmp_path)


def test_pytorch_is_not_even_imported_where_there_is_no_gpu(model_directory: Path) -> None:
    code = """
import sys
from services.scheduler.config import SchedulerConfig
from services.scheduler.engines import load
import os
import subprocess
import sys
from pathlib import Path
print(load(SchedulerConfig(model=Path(sys.argv[1]), device=sys.argv[2])).report["engine"], "torch" in sys.modules)
"""
    device = "cpu" if torch.cuda.is_available() else "auto"
    command = [sys.executable, "-c", code, str(model_directory), device]
    path = os.pathsep.join(("build/gen", *sys.path))
    told = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, check=True)
    assert told.stdout.split()[-2:] == ["cpu", "False"]
