from pathlib import Path
from typing import Any

import pytest

from services.runtime.config import ConfigError, load
from services.scheduler import engines
from services.scheduler.config import SchedulerConfig
from services.scheduler.engine.fake import FakeEngine
from tests.step_library import needs_step_library


def fake(**settings: Any) -> SchedulerConfig:
    return SchedulerConfig(engine="fake", **settings)


@pytest.mark.parametrize(
    ("key", "argv"),
    [
        ("model", []),
        ("max_running", ["--engine", "fake", "--max-running", "0"]),
        ("max_step_tokens", ["--engine", "fake", "--max-running", "64", "--max-step-tokens", "63"]),
        ("max_held", ["--engine", "fake", "--max-held", "10"]),
        ("kv_memory_bytes", ["--engine", "fake", "--kv-tokens", "10", "--kv-memory-bytes", "10"]),
        ("threads", ["--engine", "fake", "--threads", "0"]),
        ("stall_timeout_s", ["--engine", "fake", "--stall-timeout-s", "0"]),
        ("engine", ["--engine", "magic"]),
        ("weights_format", ["--engine", "fake", "--weights-format", "int8"]),
        ("weights_format", ["--model", "x", "--engine", "torch", "--weights-format", "int8"]),
        ("dtype", ["--model", "x", "--engine", "cpu", "--dtype", "bf16"]),
        ("dtype", ["--model", "x", "--weights-format", "int8", "--dtype", "bf16"]),
        ("kv_dtype", ["--model", "x", "--engine", "cpu", "--kv-dtype", "fp8"]),
        ("kv_dtype", ["--engine", "fake", "--kv-dtype", "fp8"]),
        ("kv_dtype", ["--model", "x", "--weights-format", "int8", "--kv-dtype", "fp8"]),
        ("kv_dtype", ["--model", "x", "--kv-dtype", "int8"]),
        ("device", ["--model", "x", "--engine", "cpu", "--device", "cuda"]),
        ("draft_tokens", ["--engine", "fake", "--draft-tokens", "-1"]),
        ("draft_tokens", ["--model", "x", "--engine", "torch", "--draft-tokens", "7"]),
    ],
)
def test_what_cannot_work_is_refused_naming_the_key(key: str, argv: list[str]) -> None:
    with pytest.raises(ConfigError, match=key):
        load(SchedulerConfig, prog="scheduler", argv=argv, environ={})


def test_the_fake_engine_needs_no_model() -> None:
    config = load(SchedulerConfig, prog="scheduler", argv=["--engine", "fake", "--fake-mode", "echo"], environ={})
    loaded = engines.load(config)
    assert isinstance(loaded.engine, FakeEngine)
    assert loaded.hello(5).model_id == "fake"


def test_the_fake_engine_pretends_to_be_the_model_it_is_given(model_directory: Path) -> None:
    loaded = engines.load(fake(model=model_directory, kv_tokens=1 << 20))
    hello = loaded.hello(5)
    assert (hello.epoch, hello.model_id, hello.vocab_size) == (5, model_directory.name, 49152)
    assert len(hello.tokenizer_digest) == 32
    assert loaded.card is not None
    assert loaded.engine.info.eos_token_ids == loaded.card.eos_token_ids


def test_hello_tells_what_fits_the_pool_where_that_is_less_than_the_context() -> None:
    loaded = engines.load(fake(kv_tokens=160, context_length=1000))
    assert loaded.hello(1).context_length == 161
    assert engines.load(fake(kv_tokens=1600, context_length=1000)).hello(1).context_length == 1000


def test_a_directory_that_is_no_model_is_a_readable_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json"):
        engines.load(fake(model=tmp_path))


def test_the_warm_up_leaves_nothing_in_the_engine() -> None:
    engine = engines.load(fake()).engine
    assert isinstance(engine, FakeEngine)
    assert not engine._sequences


@needs_step_library
def test_on_a_cpu_the_step_library_is_chosen_and_steps_are_short(model_directory: Path) -> None:
    config = SchedulerConfig(model=model_directory, device="cpu", kv_tokens=256)
    loaded = engines.load(config)
    assert (loaded.report["engine"], loaded.report["weights_format"]) == ("cpu", "int4")
    assert config.limits_of(loaded.engine.info).max_step_tokens == 256


@pytest.mark.parametrize(
    ("settings", "step_tokens"),
    [({}, 512), ({"max_running": 600}, 600), ({"max_step_tokens": 300}, 300), ({"max_step_tokens": 2000}, 2000)],
)
def test_a_step_is_as_long_as_the_engine_likes_it_unless_told_otherwise(
    settings: dict[str, int], step_tokens: int
) -> None:
    config = fake(**settings)
    assert config.limits_of(engines.load(config).engine.info).max_step_tokens == step_tokens


def test_where_pytorch_computes_on_a_cpu_the_report_says_why(model_directory: Path) -> None:
    loaded = engines.load(SchedulerConfig(model=model_directory, device="cpu", dtype="fp32", kv_tokens=256))
    assert (loaded.report["engine"], loaded.report["engine_cpu"]) == ("torch", "not used: dtype fp32 was asked for")


def test_an_fp8_cache_is_refused_where_no_kernel_reads_it(model_directory: Path) -> None:
    with pytest.raises(ConfigError, match="kv_dtype fp8 needs a CUDA device"):
        engines.load(SchedulerConfig(model=model_directory, device="cpu", kv_dtype="fp8", kv_tokens=256))


@pytest.mark.parametrize("asked", [{"weights_format": "int8"}, {"draft_tokens": 7}], ids=str)
def test_what_only_the_step_library_can_do_is_never_silently_ignored(model_directory: Path, asked: Any) -> None:
    [(key, value)] = asked.items()
    with pytest.raises(ConfigError, match=f"{key} {value} needs engine cpu: device cuda was asked for"):
        engines.load(SchedulerConfig(model=model_directory, device="cuda", **asked))
