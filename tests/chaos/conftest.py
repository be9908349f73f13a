"""Options of the chaos suites by environment, and a state directory of each test's own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def state_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    base = tmp_path / "state"
    monkeypatch.setenv("QUIRE_STATE_DIR", str(base))
    return base


@pytest.fixture
def seed() -> int:
    """QUIRE_CHAOS_SEED, or another one each time; printed, since it is what a failure is run again with."""
    chosen = int(os.environ.get("QUIRE_CHAOS_SEED") or int.from_bytes(os.urandom(3)))
    print(f"\nQUIRE_CHAOS_SEED={chosen}")
    return chosen
