"""bench/LOG.md: each entry says what was predicted, what came out, and on what machine."""

from __future__ import annotations

from bench import ROOT
from bench.harness.bench_log import read_entries


def test_each_entry_has_a_prediction_a_result_and_a_machine() -> None:
    text = (ROOT / "bench" / "LOG.md").read_text()
    entries = read_entries(text)  # raises KeyError where one is missing
    assert len(entries) == text.count("\n### ") > 100
    assert all(entry.predicted and entry.result and entry.machine for entry in entries)
