"""A stack on the demo model, a reference of the same model, and a way to ask for many samples."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.local.spec import StackSpec
from quire.local.stack import LocalStack
from quire.models import find_model
from tests.sampling.reference import ReferenceModel


@pytest.fixture(scope="session")
def model_folder() -> Path:
    return find_model(None)


@pytest.fixture(scope="session")
def reference(model_folder: Path) -> ReferenceModel:
    return ReferenceModel(model_folder)


@pytest.fixture(scope="session")
def stack(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Iterator[LocalStack]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUIRE_STATE_DIR", str(tmp_path_factory.mktemp("sampling-state")))
        running = LocalStack(StackSpec("sampling", str(model_folder), drain_timeout_s=5.0))
    yield running
    running.close()
