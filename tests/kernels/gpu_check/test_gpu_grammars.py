"""`bench.gpu.grammars`: it serves with a real matcher, and its figures are beside what is wanted."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from bench.gpu import grammars
from bench.gpu.figures import OVER_FREE
from bench.gpu.record import Recorder
from bench.gpu.shapes import SHAPES
from quire_worker.matcher.guidance_backend import GuidanceBackend
from quire_worker.matcher.vocabulary import load_vocabulary


def test_rows_with_grammars_are_measured_beside_rows_without(tmp_path: Path) -> None:
    out = tmp_path / "figures.json"
    grammars.main(["--models", "tiny", "--batches", "2", "3", "--output", "5", "--out", str(out)])
    found = json.loads(out.read_text())
    assert [*found] == ["tiny grammars 2", "tiny grammars 3"]
    for figures in found.values():
        assert figures["percent"] == pytest.approx(100 * (figures["tpot_ms"] / figures["free_tpot_ms"] - 1))
        assert figures["mask_us"] > 0 and 0 <= figures["held_percent"] <= 100


def test_figures_are_told_beside_what_is_wanted() -> None:
    recorder = Recorder(3, "a machine")
    rows = {f"0.6B {row}": {"percent": percent} for row, percent in zip(OVER_FREE, (4.0, 6.0), strict=True)}
    grammars.report(recorder, rows)
    assert [(line["check"], line["wanted"], line["reached"]) for line in recorder.lines] == [
        ("0.6B grammars 32", 5.0, True),
        ("0.6B grammars 128", 5.0, False),
    ]


def test_made_up_tokenizer_has_a_token_for_each_of_the_models(tmp_path: Path) -> None:
    """A mask of most tokens, and one that a grammar forces."""
    vocab = SHAPES["0.6B"].vocab_size
    grammars.write_tokenizer(tmp_path, vocab)
    state, _ = GuidanceBackend(load_vocabulary(tmp_path, vocab, (vocab - 1,)), vocab, (vocab - 1,)).compile_grammar(
        grammars.GRAMMAR
    )
    allowed = list[int]()
    for _ in range(20):
        tokens = np.flatnonzero(~state.compute_mask().forbidden(vocab))
        allowed.append(len(tokens))
        state.accept_tokens([int(tokens[-1])])
    assert max(allowed) > 0.9 * vocab and min(allowed) == 1
