"""The five real processes on the demo model, started once; and a state directory of each test's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path

import httpx
import pytest

from quire import Client
from quire.local.spec import StackSpec
from quire.local.stack import LocalStack
from quire.models import find_model
from tests.pipeline.leftovers import assert_nothing_left
from tests.pipeline.mutual_tls import ENABLED, mutual_tls
from tests.pipeline.page_tiers import PATIENT

REQUEST_LIMIT_S = 120.0


@pytest.fixture(scope="session", autouse=True)
def quick_starts() -> Iterator[None]:
    """Compiled attention takes four seconds of each worker's start; what it computes has tests of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUIRE_WORKER_ATTENTION_BACKEND", "torch")
        yield


@pytest.fixture(scope="session", autouse=True)
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Under `make test-mtls`, the stacks of all tests use mutual TLS."""
    with mutual_tls(tmp_path_factory.mktemp("certificates")) if ENABLED else nullcontext():
        yield


@pytest.fixture(scope="session")
def demo_model() -> Path:
    return find_model(None)


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory, demo_model: Path) -> Iterator[LocalStack]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUIRE_STATE_DIR", str(tmp_path_factory.mktemp("session-state")))
        running = LocalStack(StackSpec("session", str(demo_model), drain_timeout_s=10.0, flags=PATIENT))
        state = running.directory.read()
    assert state is not None
    yield running
    assert running.deaths == []
    running.close()
    assert_nothing_left(state)


@pytest.fixture
def client(stack: LocalStack) -> Iterator[Client]:
    with Client(stack.grpc) as connected:
        yield connected


@pytest.fixture
def http(stack: LocalStack) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=stack.ready.http, timeout=REQUEST_LIMIT_S) as connected:
        yield connected


@pytest.fixture(autouse=True)
def state_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test sees, or stops, a stack that the developer runs."""
    base = tmp_path / "state"
    monkeypatch.setenv("QUIRE_STATE_DIR", str(base))
    return base
