"""What every test shares: hypothesis profiles, markers that follow from the folder, the embedded model's place."""

from __future__ import annotations

import asyncio
import gc
import io
import os
import sys
from collections.abc import Generator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from tests.sampling import Sampling

# Two spinning OpenMP threads beside other processes make a small matrix product ten times slower; read by torch's
# import.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

# Triton's kernels run in its interpreter here, on any machine; read by Triton's import. `make test-gpu` sets 0.
os.environ.setdefault("TRITON_INTERPRET", "1")

ROOT = Path(__file__).resolve().parent.parent
EMBEDDED_MODEL = ROOT / "build/model/smollm2-135m-instruct"

_EXIT_STATUS = pytest.StashKey[int]()

# A shared machine makes single examples slow, so no example has a deadline; the test's own timeout is the bound.
settings.register_profile("default", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", settings.get_profile("default"), derandomize=True, print_blob=True)
settings.register_profile("nightly", settings.get_profile("default"), max_examples=5_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci" if os.environ.get("CI") else "default"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks all of tests/e2e as e2e, and whatever asks for the model as model."""
    for item in items:
        if ROOT / "tests/e2e" in item.path.parents:
            item.add_marker("e2e")
        if "model_directory" in getattr(item, "fixturenames", ()):
            item.add_marker("model")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
    """A test that hung says where each of its tasks waits; the traceback alone only shows the event loop's."""
    report = yield
    if call.excinfo is not None and "pytest-timeout" in str(call.excinfo.value):
        report.sections.append(("Tasks still open", _open_tasks()))
    return report


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    """Keeps the status for the process's end."""
    session.config.stash[_EXIT_STATUS] = int(exitstatus)


@pytest.hookimpl(trylast=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    """The runner's closing line stays the last one: at the interpreter's end Triton's bindings list leaks of theirs."""
    if "triton" in sys.modules and not hasattr(config, "workerinput"):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(config.stash.get(_EXIT_STATUS, 1))


def _open_tasks() -> str:
    # By its type: isinstance would ask a dead weak proxy among them what it is, which raises.
    tasks = [found for found in gc.get_objects() if issubclass(type(found), asyncio.Task) and not found.done()]
    written = io.StringIO()
    for task in tasks:
        task.print_stack(file=written)
    return written.getvalue()


@pytest.fixture(scope="module", params=["numpy", "pytorch"])
def sampling(request: pytest.FixtureRequest) -> Sampling:
    """Each of the samplers for CPUs."""
    from tests.sampling import Sampling  # few tests draw, and the rest shouldn't wait for PyTorch

    return Sampling(request.param)


@pytest.fixture(scope="session")
def model_directory() -> Path:
    """The exported embedded model; a missing one fails the test, since `make test` always makes it."""
    if not (EMBEDDED_MODEL / "tokenizer.json").exists():
        pytest.fail("the embedded model isn't there: run `make model`")
    return EMBEDDED_MODEL
