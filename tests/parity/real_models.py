"""Real models for tests: fetched once into the checkout's build folder, or the reason why not."""

from __future__ import annotations

from pathlib import Path

import pytest

from quire.errors import Unavailable
from quire.model_catalog import CATALOG, pull

FOLDER = Path(__file__).resolve().parents[2] / "build" / "models"


def real_model(name: str) -> Path:
    """A model of the catalogue; the test is skipped where it cannot be had."""
    try:
        return pull(CATALOG[name], folder=FOLDER)
    except Unavailable as error:
        pytest.skip(error.message)
