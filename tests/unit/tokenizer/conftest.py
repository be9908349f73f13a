from __future__ import annotations

from pathlib import Path

import pytest

from quire_tokenizer.vocabulary import Vocabulary
from tests.unit.tokenizer import folders


@pytest.fixture(scope="session")
def vocabularies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Vocabulary]:
    """One per kind of tokenizer."""
    root: Path = tmp_path_factory.mktemp("models")
    return {kind: folders.load(root / kind, kind) for kind in folders.KINDS}


@pytest.fixture(scope="session")
def vocabulary(vocabularies: dict[str, Vocabulary]) -> Vocabulary:
    """The byte-level one."""
    return vocabularies["byte_level"]
