"""What a step promises: neighbours, shared blocks, chunks, recomputes and broken numbers change nobody's answer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from kernels.ops import reference_ops
from kernels.rms_norm import rms_norm
from services.scheduler.engine.api import (
    Engine,
    Failed,
    FailureKind,
    Logprobs,
    Sampled,
    SamplingSpec,
    SequenceKey,
    Slice,
)
from services.scheduler.engine.settings import TorchEngineConfig
from services.scheduler.engine.torch_engine import load_engine
from tests.engine_driver import Job, run
from tests.integration.model.small_models import VOCAB_SIZE, load_small_cpu_engine, load_small_engine, save_small_model
from tests.step_library import needs_step_library

POISON = 90  # its embedding is NaN
PROMPT = [(5 * i + 3) % 80 for i in range(23)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    save_small_model(path, num_key_value_heads=2)
    return path


ENGINES: dict[str, Callable[[Path], Engine]] = {
    "torch": load_small_engine,
    "cpu fp32": load_small_cpu_engine,
    "cpu int8": partial(load_small_cpu_engine, weights_format="int8"),
}


@pytest.fixture(params=[pytest.param(name, marks=[needs_step_library] if "cpu" in name else []) for name in ENGINES])
def load(request: pytest.FixtureRequest) -> Callable[[Path], Engine]:
    return ENGINES[request.param]


@pytest.fixture
def engine(folder: Path, load: Callable[[Path], Engine]) -> Engine:
    return load(folder)


@pytest.fixture
def poisoned_engine(tmp_path: Path, load: Callable[[Path], Engine]) -> Engine:
    save_small_model(tmp_path, num_key_value_heads=2)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.embed_tokens.weight"][POISON] = float("nan")
    save_file(weights, tmp_path / "model.safetensors")
    return load(tmp_path)


def job(spec: SamplingSpec, *, prompt: Sequence[int] = PROMPT, max_tokens: int = 12) -> Job:
    return Job(prompt, spec, max_tokens)


def step(engine: Engine, key: int, ids: Sequence[int], start: int, blocks: Sequence[int], position: int = 0) -> int:
    (answer,) = engine.step([Slice(SequenceKey(key), ids, start, blocks, True, position, False)])
    assert isinstance(answer, Sampled), answer
    return answer.token_id


def test_seed_42_gives_the_same_ids_alone_and_beside_any_neighbour(engine: Engine) -> None:
    mine = SamplingSpec(seed=42)
    alone, beside_unseeded, beside_top_k = job(mine), job(mine), job(mine)
    run(engine, [alone])
    run(engine, [job(SamplingSpec(seed=987654321), prompt=PROMPT[:9]), beside_unseeded], chunk=5)
    run(engine, [beside_top_k, job(SamplingSpec(seed=1, top_k=5), prompt=PROMPT[4:])], chunk=8)
    assert alone.tokens == beside_unseeded.tokens == beside_top_k.tokens


def test_choices_of_one_seed_differ(engine: Engine) -> None:
    choices = [job(SamplingSpec(seed=42, choice=choice)) for choice in range(3)]
    run(engine, choices)
    assert len({tuple(choice.tokens) for choice in choices}) == 3


def test_broken_numbers_fail_their_own_request_alone(poisoned_engine: Engine) -> None:
    never_poison = SamplingSpec(seed=1, logit_bias=((POISON, float("-inf")),))
    good, expected = job(never_poison), job(never_poison)
    bad = job(SamplingSpec(seed=2), prompt=[1, POISON, 3])
    run(poisoned_engine, [expected])
    run(poisoned_engine, [bad, good])
    assert isinstance(bad.failure, Failed)
    assert bad.failure.kind is FailureKind.BAD_OUTPUT
    assert bad.tokens == []
    assert good.tokens == expected.tokens


def test_blocks_of_a_broken_request_are_safe_for_the_next_owner(poisoned_engine: Engine) -> None:
    engine, blocks = poisoned_engine, range(8)
    engine.open(SequenceKey(1), SamplingSpec(seed=0, temperature=0.0), PROMPT, ())
    clean = step(engine, 1, PROMPT[:22], 0, range(20, 28))
    for chunk in (PROMPT[:22], PROMPT[:21]):
        engine.step([Slice(SequenceKey(1), [POISON] * 32, 0, blocks, False, 0, False)])
        if len(chunk) == 22:
            assert step(engine, 1, chunk, 0, blocks) == clean
        else:
            step(engine, 1, chunk, 0, blocks)
            assert step(engine, 1, PROMPT[21:22], 21, blocks) == clean  # a decode reads the rest of its last block


@pytest.mark.parametrize("length", [3, 4, 5, 8, 9])
def test_prefix_shared_with_another_sequence_gives_the_same_logprobs(engine: Engine, length: int) -> None:
    # The block size is 4: lengths one below, at and one above it. Whole blocks alone are shared, and never the last id.
    spec = SamplingSpec(seed=0, temperature=0.0, logprobs=VOCAB_SIZE)
    shared = (length - 1) // 4 * 4
    found: list[Logprobs] = []
    for key, (blocks, start) in enumerate([([9, 3, 7], 0), ([9, 3, 12], shared), ([9, 3, 13], shared)]):
        engine.open(SequenceKey(key), spec, PROMPT[:length], ())
        table = blocks if start == 8 or not start else [*[9, 3, 7][: start // 4], 20 + key, 30 + key]
        (answer,) = engine.step([Slice(SequenceKey(key), PROMPT[start:length], start, table, True, 0, False)])
        assert isinstance(answer, Sampled)
        assert answer.logprobs is not None
        found.append(answer.logprobs)
    for other in found[1:]:
        by_id = dict(zip(other.top_ids, other.top_logprobs, strict=True))
        assert [by_id[token] for token in found[0].top_ids] == pytest.approx(found[0].top_logprobs, abs=1e-4)


def test_a_recomputed_sequence_goes_on_with_the_same_ids(engine: Engine) -> None:
    # Preempted twice: its blocks are gone, prompt and output are prefilled anew.
    spec = SamplingSpec(seed=7, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2, logprobs=1)
    expected = job(spec)
    run(engine, [expected])
    output: list[int] = []
    for rounds, blocks in ((4, range(10)), (3, range(20, 30)), (5, range(40, 50))):
        engine.open(SequenceKey(99), spec, PROMPT, output)
        ids, start = [*PROMPT, *output], 0
        for _ in range(rounds):
            output.append(step(engine, 99, ids, start, blocks, len(output)))
            start, ids = start + len(ids), output[-1:]
        engine.close(SequenceKey(99))
    assert output == expected.tokens


def test_chunks_before_the_last_give_no_token(engine: Engine) -> None:
    engine.open(SequenceKey(1), SamplingSpec(seed=0), PROMPT, ())
    assert engine.step([Slice(SequenceKey(1), PROMPT[:10], 0, range(8), False, 0, False)]) == []
    assert len(engine.step([Slice(SequenceKey(1), PROMPT[10:], 10, range(8), True, 0, False)])) == 1


def test_prompts_up_to_the_whole_context_are_computed(engine: Engine) -> None:
    context = engine.info.context_length
    prompt = [i % 80 for i in range(context)]
    engine.open(SequenceKey(1), SamplingSpec(seed=0), prompt, ())
    step(engine, 1, prompt[:-1], 0, range(context // 4))
    step(engine, 1, prompt[-1:], context - 1, range(context // 4), position=1)


def test_an_empty_step_answers_nothing(engine: Engine) -> None:
    assert engine.step([]) == []


def test_any_operation_can_be_replaced(folder: Path) -> None:
    calls = 0

    def counted(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return rms_norm(x, weight, eps)

    ops = replace(reference_ops(), name="counted", rms_norm=counted)
    engine = load_engine(TorchEngineConfig(model=folder, device="cpu", kv_tokens=64, block_size=4), ops=ops)
    engine.open(SequenceKey(1), SamplingSpec(seed=0), [1], ())
    step(engine, 1, [1], 0, [0])
    assert calls == 1
    assert engine.report.operations == "counted"


@pytest.mark.parametrize(
    "settings", [{"kv_tokens": 64, "kv_memory_bytes": 64}, {"block_size": 0}, {"dtype": "fp8"}, {"kv_tokens": -1}]
)
def test_senseless_settings_are_refused(settings: dict) -> None:
    with pytest.raises(ValueError):
        TorchEngineConfig(model=Path(), **settings)


def test_a_cache_of_less_than_a_block_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="less than one block"):
        load_small_engine(folder, kv_tokens=3)
