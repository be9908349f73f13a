"""Options of the chaos suites by environment, and a state directory of each test's own."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def state_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    base = tmp_path / "state"
    monkeypatch.setenv("QUIRE_STATE_DIR", str(base))
    return base


@pytest.fixture
def chaos_seed() -> int:
    """CHAOS_SEED or QUIRE_CHAOS_SEED, or another each time; printed, since a failure is run again with it."""
    said = os.environ.get("CHAOS_SEED") or os.environ.get("QUIRE_CHAOS_SEED")
    chosen = int(said or int.from_bytes(os.urandom(3)))
    print(f"\nCHAOS_SEED={chosen}")
    return chosen


@pytest.fixture
def seed(request: pytest.FixtureRequest, chaos_seed: int) -> int:
    """Each test makes a number of its own of it: what was asked on a stack before is in its caches."""
    return random.Random(f"{chaos_seed} {request.node.name}").getrandbits(31)
