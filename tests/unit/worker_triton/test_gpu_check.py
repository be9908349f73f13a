"""`make gpu-check` on whatever machine there is: stages run, tiny, or say what they skip; what they found is kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bench import gpu_check
from bench.gpu_checks import table
from bench.gpu_checks.record import Recorder

# The interpreter computes with numpy, which tells of the overflow that a sigmoid is meant to have.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")


def lines(captured: str) -> list[dict[str, object]]:
    return [json.loads(line) for line in captured.splitlines() if line.startswith('{"stage"')]


def run(stage: int, capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    code = gpu_check.main(["--stage", str(stage), "--tiny", "--no-log"])
    found = lines(capsys.readouterr().out)
    assert all(line["stage"] == stage for line in found)
    results = {str(line["check"]): str(line["result"]) for line in found}
    assert code == 0 and "FAILED" not in results.values(), results
    return results


def test_engines_come_to_the_same_tokens(capsys: pytest.CaptureFixture[str]) -> None:
    results = run(2, capsys)
    assert sum(result == "ok" for result in results.values()) >= 2
    assert results["alone equals batched (--batch-invariant)"] == ("ok" if torch.cuda.is_available() else "skipped")


def test_the_table_is_skipped_by_name_or_measured(capsys: pytest.CaptureFixture[str]) -> None:
    for stage in (3, 6):
        assert set(run(stage, capsys).values()) <= {"skipped", "ok", "measured"}


@pytest.mark.slow
def test_pages_between_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    results = run(7, capsys)
    assert "ok" in results.values()


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 4, 5])
def test_other_stages(stage: int, capsys: pytest.CaptureFixture[str]) -> None:
    results = run(stage, capsys)
    assert sum(result == "ok" for result in results.values()) >= 2, results


def test_figures_stand_beside_vllms(capsys: pytest.CaptureFixture[str]) -> None:
    recorder = Recorder(3, "a machine")
    table.report(recorder, {"0.6B itl 8": {"itl_ms": 1.0, "steps": 5}, "8B prefill 32 x 4096": {"input_tok_s": 41_200}})
    good, short = lines(capsys.readouterr().out)
    assert good == {
        "stage": 3, "check": "0.6B itl 8", "result": "measured", "itl_ms": 1.0, "vllm": 1.99, "wanted": 1.15,
        "beats_vllm": True, "reached": True,
    }  # fmt: skip  # one line of JSON
    assert short["beats_vllm"] is True and short["reached"] is False


def test_a_failure_is_told_and_logged(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log = tmp_path / "LOG.md"
    log.write_text("| date |\n|---|")
    recorder = Recorder(1, "a machine")
    recorder.check("first", True)
    recorder.check("second", False, worst=3.0)
    recorder.skip("third", "there is no GPU")
    recorder.figure("fourth", us=1.23456)
    recorder.append_to(log)
    row = log.read_text().splitlines()[-1]
    assert not recorder.good and len(log.read_text().splitlines()) == 3
    assert "1 checks hold, 1 fail, 1 skipped (failed: second); fourth: us 1.235" in row
    assert row.startswith("| 20") and row.count("|") == 6 and "FAILED: second" in capsys.readouterr().err
