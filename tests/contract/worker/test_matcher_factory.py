"""Whether a worker says that it applies grammars: only where llguidance can read the model's tokenizer."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest

from quire.models import find_model
from quire_common.structured.capability import STRUCTURED_OUTPUT
from quire_worker.config import WorkerConfig
from quire_worker.matcher import matcher_factory
from quire_worker.paced.served import load_paced
from tests.unit.tokenizer import folders

DEMO = Path(str(find_model(None)))


def capabilities(model: Path, max_constrained_seqs: int = 4) -> tuple[str, ...]:
    """The capabilities that a paced worker of this model announces."""
    config = WorkerConfig(model=str(model), max_constrained_seqs=max_constrained_seqs, paced=0.0)
    return load_paced(config, lambda *_: None).info.capabilities


@pytest.fixture
def demo(tmp_path: Path) -> Path:
    """A copy of the demo model, whose tokenizer a test may change."""
    folder = tmp_path / "demo"
    shutil.copytree(DEMO, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    return folder


def test_model_with_a_readable_tokenizer_has_structured_output(demo: Path) -> None:
    assert STRUCTURED_OUTPUT in capabilities(demo)
    assert STRUCTURED_OUTPUT not in capabilities(demo, 0)


@pytest.mark.parametrize("kind", ["word_piece", "nonsense", "none"])
def test_model_whose_tokenizer_cannot_be_read_has_none(kind: str, demo: Path, tmp_path: Path) -> None:
    tokenizer = demo / "tokenizer.json"
    if kind == "word_piece":
        shutil.copy(folders.write_folder(tmp_path / "other", "word_piece") / "tokenizer.json", tokenizer)
    elif kind == "nonsense":
        tokenizer.write_text('{"model": {}}')
    else:
        tokenizer.unlink()
    assert STRUCTURED_OUTPUT not in capabilities(demo)


def test_tokenizer_is_utf_8_whatever_the_encoding_of_the_system(demo: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("LC_ALL", "C"), ("PYTHONUTF8", "0"), ("PYTHONCOERCECLOCALE", "0")):
        monkeypatch.setenv(name, value)
    assert STRUCTURED_OUTPUT in capabilities(demo)


@pytest.mark.parametrize("does", ["import threading; threading.Event().wait()", "import os; os.abort()"])
def test_process_that_hangs_or_dies_over_the_tokenizer_harms_nobody(
    does: str, demo: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matcher_factory, "CHECK_COMMAND", (sys.executable, "-c", does))
    monkeypatch.setattr(matcher_factory, "CHECK_TIMEOUT_S", 2.0)
    assert STRUCTURED_OUTPUT not in capabilities(demo)
