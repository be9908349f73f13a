from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def state_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No test sees, or stops, a stack that the developer runs."""
    base = tmp_path / "state"
    monkeypatch.setenv("QUIRE_STATE_DIR", str(base))
    return base
