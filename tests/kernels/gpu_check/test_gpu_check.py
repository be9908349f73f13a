"""`make gpu-check` on whatever machine there is: stages run, tiny, or say what they skip; what they found is kept."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch

from bench.gpu import served_table, services, table
from bench.gpu.http_load import HttpLoad
from bench.gpu.record import Recorder
from bench.harness.bench_log import BenchLog, LogEntry, read_entries
from quire_common.sequence import Sequence, Stop
from tests.gpu import check, engines
from tests.model.folders import load_dummy_model

# The interpreter computes with numpy, which tells of the overflow that a sigmoid is meant to have.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")

LOADS = {each.row: each for each in served_table.LOADS}


def lines(file: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def run(stage: int, folder: Path, *parts: str) -> dict[str, str]:
    out = folder / f"{stage}.jsonl"
    chosen = ["--parts", *parts] if parts else []
    code = check.main(["--stage", str(stage), "--tiny", "--no-log", "--out", str(out), *chosen])
    *found, summary = lines(out)
    assert all(line["stage"] == stage for line in found)
    results = {str(line["check"]): str(line["result"]) for line in found}
    assert code == 0 and "FAILED" not in results.values() and summary["result"] == "ok", results
    return results


@pytest.mark.deep
def test_engines_come_to_the_same_tokens(tmp_path: Path) -> None:
    results = run(2, tmp_path)
    assert sum(result == "ok" for result in results.values()) >= 2
    assert results["alone equals batched (--batch-invariant)"] == ("ok" if torch.cuda.is_available() else "skipped")


@pytest.mark.slow
def test_pages_between_gpus(tmp_path: Path) -> None:
    results = run(7, tmp_path)
    assert "ok" in results.values()


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 3, 4, 5, 6])
def test_other_stages(stage: int, tmp_path: Path) -> None:
    results = [*run(stage, tmp_path).values()]
    assert "ok" in results and len(results) >= 2, results


@pytest.mark.parametrize("wrong", [False, True])
def test_alone_is_compared_with_batched(wrong: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU's engine, whose answers do not depend on company either."""
    monkeypatch.setattr(engines, "_served_on_gpu", lambda **_: load_dummy_model(tmp_path, head_dim=12))
    serve = engines.serve
    monkeypatch.setattr(engines, "serve", lambda *given, **how: serve(*given, **how)[:: -1 if wrong and not how else 1])
    recorder = Recorder(2, "a machine")
    sequences = [Sequence(np.full(size, 7, np.int32), Stop(4, ignore_eos=True)) for size in (5, 40, 17)]
    engines._alone_and_batched(recorder, "alone equals batched", sequences)
    assert recorder.good is not wrong and recorder.lines[0]["sequences"] == 3


def test_figures_stand_beside_vllms(tmp_path: Path) -> None:
    recorder = Recorder(3, "a machine", tmp_path / "out")
    table.report(recorder, {"0.6B itl 8": {"itl_ms": 1.0, "steps": 5}, "8B prefill 32 x 4096": {"input_tok_s": 41_200}})
    good, short = lines(tmp_path / "out")
    assert good == {
        "stage": 3, "check": "0.6B itl 8", "result": "measured", "itl_ms": 1.0, "vllm": 1.99, "wanted": 1.15,
        "beats_vllm": True, "reached": True, "group": "",
    }  # fmt: skip  # one line of JSON
    assert short["beats_vllm"] is True and short["reached"] is False


def test_what_costs_more_than_it_may_is_not_reached() -> None:
    recorder = Recorder(3, "a machine")
    table.report(recorder, {"0.6B greedy 256": {"itl_ms": 3.0}, "0.6B sampling 256": {"itl_ms": 3.3}})
    load, found = LOADS["512 x 512/256"], {"output_throughput": 40_000.0}
    served_table.report_row(recorder, "0.6B", load, found, {"output_tok_s": 41_000.0})
    _, drawn, served = recorder.lines
    assert (drawn["vllm"], drawn["wanted"], drawn["reached"]) == (None, 8.0, False)
    assert drawn["percent"] == pytest.approx(10.0)
    assert served["reached"] is False and served["beats_vllm"] is True, "42,000 are wanted, and vLLM does 31,839"
    assert served["cost_reached"] is True and served["cost_percent"] == pytest.approx(100 / 41)
    served_table.report_row(recorder, "8B", LOADS["itl 1"], {"median_tpot_ms": 4.0}, None)
    assert recorder.lines[-1] == {
        "stage": 3, "check": "8B itl 1, tpot_ms", "result": "measured", "services": 4.0, "vllm": 4.92, "wanted": 3.95,
        "beats_vllm": True, "reached": False, "load_generator": "quire bench serve",
    }, "what nobody has measured in process has no cost"  # fmt: skip  # one line of JSON


def test_streams_have_a_row_for_each_figure_that_counts() -> None:
    recorder, found = Recorder(4, "a machine"), {"median_ttft_ms": 7.9, "median_tpot_ms": 0.8, "output_throughput": 900}
    services.report_streams(recorder, "one stream", 1, found, {"router": 0.304}, on_gpu=True)
    first, between, others, processes = recorder.lines
    assert (first["ttft_p50_ms"], first["vllm"], first["wanted"], first["reached"]) == (7.9, 13.2, 6.0, False)
    assert (between["tpot_p50_ms"], between["wanted"], between["reached"]) == (0.8, 0.85, True)
    assert others["output_tok_s"] == 900 and "wanted" not in others
    assert (processes["load_generator"], processes["router_cores"]) == ("quire bench serve, 1 process", 0.3)
    assert [line["check"] for line in (first, others)] == ["one stream, ttft_p50_ms", "one stream, other figures"]


class _Stack:
    """Stands for LocalStack."""

    ready = SimpleNamespace(http="http://nowhere")

    def __init__(self, _spec: object) -> None:
        """Started."""

    def close(self) -> None:
        """Ended."""


class TestRowsThatFail:
    """Those that were measured are kept, and the stage has failed."""

    @pytest.fixture(autouse=True)
    def processes(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(served_table, "LocalStack", _Stack)
        monkeypatch.setattr(served_table, "write_config", lambda folder, *_: folder)
        monkeypatch.setattr(served_table, "cpu_seconds", lambda _: {"router": 1.0})
        monkeypatch.setattr(subprocess, "run", self.in_process)

    figures: ClassVar[dict[str, dict[str, float]]] = {
        "tiny itl 1": {"itl_ms": 1.0, "tpot_ms": 1.2},
        "tiny itl 8": {"itl_ms": 1.5, "tpot_ms": 0.0},
    }
    exit_code = 0

    def in_process(self, command: list[str], **_: object) -> SimpleNamespace:
        Path(command[command.index("--out") + 1]).write_text(json.dumps(self.figures))
        return SimpleNamespace(returncode=self.exit_code)

    def stage(self, number: int, folder: Path) -> tuple[int, dict[str, dict[str, object]]]:
        out = folder / "out"
        code = check.main(["--stage", str(number), "--no-log", "--out", str(out)])
        return code, {str(line["check"]): line for line in lines(out)[:-1]}

    def test_of_the_table_through_the_services(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def put(load: HttpLoad, _url: str, _folder: Path) -> dict[str, float]:
            if load.spread:
                raise RuntimeError("1 of 3 requests failed")
            names = ("median_tpot_ms", "output_throughput", "input_throughput", "median_ttft_ms")
            found = dict.fromkeys((*names, "median_decode_tpot_ms"), 2.0 + load.seed % 2)
            return found | {"decode_window_concurrency": load.requests, "decode_window_s": 1.0}

        monkeypatch.setattr(HttpLoad, "put", put)
        code, found = self.stage(6, tmp_path)
        assert code == 1
        failed = found.pop("tiny 256 x 100..1024 through the services")
        assert failed["result"] == "FAILED" and "1 of 3 requests failed" in str(failed["error"])
        assert found.pop("tiny in process")["result"] == "ok"
        assert len(found) == len(LOADS) - 1 and {line["result"] for line in found.values()} == {"measured"}
        alone, together = found["tiny itl 1, tpot_ms"], found["tiny itl 8, decode_tpot_ms"]
        assert (alone["services"], alone["in_process"], alone["cost_percent"]) == (3.0, 1.0, 200.0), "the second turn"
        assert alone["tpot_cost_percent"] == pytest.approx(150) and "tpot_cost_percent" not in together
        assert (together["services"], together["least"], together["tpot_ms"]) == (2.0, 2.0, 3.0)
        assert "cost_percent" not in found["tiny prompt 1024, first_ms"]

    def test_of_the_table_in_process(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(TestRowsThatFail, "exit_code", -9)
        code, found = self.stage(3, tmp_path)
        assert code == 1 and found["tiny in process"]["exit_code"] == -9
        assert found["tiny itl 8"]["itl_ms"] == 1.5
        assert {*found} == {"tiny in process", "tiny itl 1", "tiny itl 8", "tiny with grammars"}

    def test_services_that_do_not_start(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken(_spec: object) -> _Stack:
            raise OSError("no port")

        monkeypatch.setattr(served_table, "LocalStack", broken)
        code, found = self.stage(6, tmp_path)
        assert code == 1 and found["tiny through the services"]["error"] == "OSError: no port"


@pytest.fixture
def log(tmp_path: Path) -> Path:
    file = tmp_path / "LOG.md"
    file.write_text("# Bench log\n")
    return file


def test_a_failure_is_told_and_logged(log: Path, capsys: pytest.CaptureFixture[str]) -> None:
    recorder = Recorder(1, "a machine", log=BenchLog(log))
    with recorder.group("all of it"):
        recorder.check("first", True)
        recorder.check("second", False, worst=3.0, told="a | b\nc")
        recorder.skip("third", "there is no GPU")
        recorder.figure("fourth", us=1.23456)
    recorder.end()
    (entry,) = read_entries(log.read_text())
    assert not recorder.good
    assert "1 checks hold, 1 fail, 1 skipped (failed: second); fourth: us 1.235" in entry.result
    assert entry.what == "`make gpu-check STAGE=1`" and entry.machine == "a machine"
    told = capsys.readouterr()
    assert "FAILED: second: worst 3, told a | b" in told.err
    figure, part, summary = told.out.splitlines()
    assert figure == "fourth: us 1.235" and part.startswith("all of it: 1 checks hold, 1 fail, 1 skipped")
    assert json.loads(summary) | {"seconds": 0} == {
        "stage": 1, "result": "FAILED", "ok": 1, "FAILED": 1, "skipped": 1, "measured": 1, "failed": ["second"],
        "did_not_end": "", "seconds": 0,
    }  # fmt: skip  # one line of JSON


def test_what_fails_by_itself_ends_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    recorder = Recorder(1, "a machine")
    for name in ("first", "second"):
        with recorder.attempt(name):
            recorder.check(f"beginning of {name}", True)
            raise RuntimeError("broken") if name == "first" else KeyError("lost")
    assert recorder.failed == ["first", "second"] and len(recorder.lines) == 4
    assert recorder.lines[1]["error"] == "RuntimeError: broken"
    assert "KeyError: 'lost'" in capsys.readouterr().err, "with the traceback"
    with pytest.raises(SystemExit), recorder.attempt("third"):
        raise SystemExit(143)


def test_an_entry_stays_where_it_is_while_others_come(log: Path) -> None:
    first, second, other = (LogEntry(what, "faster", "as fast", "a machine") for what in ("first", "second", "other"))
    mine = BenchLog(log)
    mine.put(first)
    BenchLog(log).put(other)
    mine.put(second)
    assert read_entries(log.read_text()) == [second, other]
    assert log.read_text().startswith("# Bench log\n\n### 20")


def test_a_long_entry_is_read_as_it_was_written() -> None:
    what = "`bench.gpu.engine --models 0.6B`: " + "sequences that decode, " * 12 + "greedy"
    entry = LogEntry(
        what, "no slower", "1.2 / 1.3 ms: " + "a figure; " * 40 + "the end", "one GPU | torch", "2026-11-21"
    )
    (found,) = read_entries(entry.text())
    assert max(map(len, entry.text().splitlines())) <= 120
    assert found.what.replace(":", "") == what.replace(":", "") and found.result == entry.result
    assert (found.machine, found.day) == (entry.machine, entry.day)


def test_what_was_checked_is_logged_before_the_end(log: Path) -> None:
    """Nothing runs when a process is killed: the entry must have been written by then."""
    recorder = Recorder(1, "a machine", log=BenchLog(log))
    with recorder.group("steps"):
        recorder.check("first", True)
        (entry,) = read_entries(log.read_text())
        assert "1 checks hold, 0 fail, 0 skipped, and it did not end (killed in steps)" in entry.result
    recorder.end()
    assert "did not end" not in log.read_text()


class TestStagesThatAreCutShort:
    @pytest.fixture(autouse=True)
    def a_machine_that_logs(self, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(check, "LOG", log)
        monkeypatch.setattr(check, "choose_interpreter", lambda: False)

    def part(self, monkeypatch: pytest.MonkeyPatch, name: str, then: Callable[[], object]) -> None:
        module = ModuleType(name)

        def run(recorder: Recorder, *, tiny: bool) -> None:
            recorder.check(f"beginning of {name}", True)
            then()

        module.run = run  # type: ignore[attr-defined]  # a module made here
        monkeypatch.setitem(sys.modules, f"made_here.{name}", module)
        monkeypatch.setitem(check.STAGES, 1, check.STAGES[1] | {name: f"made_here.{name}"})

    def test_a_time_limit_leaves_an_entry(self, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.part(monkeypatch, "slow", lambda: signal.raise_signal(signal.SIGTERM))
        with pytest.raises(SystemExit) as ended:
            check.main(["--stage", "1", "--parts", "slow"])
        (entry,) = read_entries(log.read_text())
        assert ended.value.code == 143
        assert "1 checks hold, 0 fail, 0 skipped, and it did not end (SystemExit 143 in slow)" in entry.result
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL

    def test_an_error_ends_its_part_alone(self, log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.part(monkeypatch, "broken", lambda: 1 // 0)
        self.part(monkeypatch, "sound", lambda: None)
        assert check.main(["--stage", "1", "--parts", "broken", "sound"]) == 1
        assert "2 checks hold, 1 fail, 0 skipped (failed: broken ends)" in read_entries(log.read_text())[0].result

    def test_an_unknown_part_is_refused(self, capsys: pytest.CaptureFixture[str]) -> None:
        with pytest.raises(SystemExit):
            check.main(["--stage", "2", "--parts", "soak"])
        assert "stage 2 has no soak: its parts are engines" in capsys.readouterr().err
