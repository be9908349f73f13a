"""What holds for all tests: property tests are not judged by how fast a busy machine draws their inputs, stacks keep
their pages away from the developer's, and threads that wait leave the processors to those that do not.

Where several processes share the tests, each takes files: long ones first, so that all end together.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from quire_common.telemetry.metrics import registry

# Before torch is loaded, and for services too: its threads spin otherwise, at two thirds of what tests compute.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
_TESTS = Path(__file__).parent
# Under `python -O`, assertions of our helpers count only where pytest rewrites them.
pytest.register_assert_rewrite(*(f"tests.{entry.stem}" for entry in _TESTS.iterdir()))
settings.register_profile("quire", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("quire")
# The longest folders first. One file compiles the CPU's kernels, which all processes of the run share. Meanwhile the
# other processes have tests that do not need them; kernels that two need at once are compiled by both.
_LONG = (
    "test_free_running.py", "stack", "exactness", "pipeline", "chaos", "parity", "sampling", "contract", "kernels",
    "model", "worker", "scheduler", "tokenizer", "test_house_rules.py",
)  # fmt: skip


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if hasattr(config, "workerinput"):
        items.sort(key=_place)


def pytest_collection_finish() -> None:
    """Modules and tests stay to the end. Garbage collections leave them out, and come seldom. With the settings of
    Python, they take a tenth of the time of unit tests."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)


def _place(item: pytest.Item) -> int:
    """The first place that the file or one of its folders has."""
    names = item.path.relative_to(_TESTS).parts
    return min((_LONG.index(name) for name in names if name in _LONG), default=len(_LONG))


@pytest.fixture(scope="session", autouse=True)
def cache_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Each test process has a cache folder of its own. Processes of one run share the compiled kernels in it, which
    take seconds to compile."""
    cache = tmp_path_factory.mktemp("cache")
    if "PYTEST_XDIST_WORKER" in os.environ:
        kernels = tmp_path_factory.getbasetemp().parent / "kernels"
        kernels.mkdir(exist_ok=True)
        (cache / "kernels").symlink_to(kernels)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUIRE_CACHE_DIR", str(cache))
        yield


@pytest.fixture(scope="module", autouse=True)
def unnamed_models() -> Iterator[None]:
    """A service that a test starts in this process gives its metrics the model's label. Other files do not see it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(registry, "_models", {})
        yield


@pytest.fixture(scope="session", autouse=True)
def optimized_services() -> Iterator[None]:
    """Under `make test-optimized`, Python processes that tests start ignore `assert`, as under `python -O`."""
    with pytest.MonkeyPatch.context() as patch:
        if os.environ.get("QUIRE_TEST_OPTIMIZED") == "1":
            patch.setenv("PYTHONOPTIMIZE", "1")
        yield


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Torch computes in one thread."""
    import torch  # takes a second, which tests without it are spared

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
