from __future__ import annotations

import io
import json
import time
from pathlib import Path

import pytest

from quire import LLM
from quire.__main__ import main
from quire.cli import registry
from quire.cli.output.progress import ProgressLines
from quire.cli.output.terminal import bar, table
from quire.cli.output.timings import timing_table
from quire.local import events
from quire.local.spec import SERVICES
from quire.local.state import StateDirectory
from quire.outputs import HopTiming
from tests.fakes.router.fake_router import FakeRouter

Fake = tuple[FakeRouter, str]
Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def state_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_STATE_DIR", str(tmp_path))


@pytest.mark.parametrize("name", registry.NAMES)
def test_every_command_helps(name: str, capsys: Capture) -> None:
    with pytest.raises(SystemExit) as raised:
        main([name, "--help"])
    assert raised.value.code == 0
    assert f"quire {name}" in capsys.readouterr().out
    assert registry.load(name).HELP


BAD = [
    (["serve", "--quantization", "fp8"], "quantization fp8 is not supported", "UNSUPPORTED_OPTION"),
    (["serve", "-tp", "2"], "tensor-parallel-size 2 is not supported", "UNSUPPORTED_OPTION"),
    (["serve", "--max-num-seq=3"], "Unknown option --max-num-seq", "UNKNOWN_OPTION"),
    (["serve", "/no/such/folder"], "There is no folder /no/such/folder", "MODEL_NOT_FOUND"),
    (["up", "--api-key", ""], "An API key is empty", "BAD_API_KEY"),
    (["up", "--api-key", " "], "An API key is empty", "BAD_API_KEY"),
    (["serve", "--api-key", "good", "--api-key", "a,b"], "has a comma", "BAD_API_KEY"),
    (["up", "--api-key", " key"], "The API key has spaces", "BAD_API_KEY"),
    (["up", "--api-key", "k\u00e9y"], "characters other than printable ASCII", "BAD_API_KEY"),
    (["serve", "--api-key", "good", "--api-key", "k\ty"], "characters other than printable ASCII", "BAD_API_KEY"),
    (["complete", "hi"], "No stack named 'default' runs here", "NOT_RUNNING"),
    (
        ["complete", "hi", "--address", "127.0.0.1:1", "--temperature", "nan"],
        "temperature is nan",
        "BAD_SAMPLING_PARAM",
    ),
    (["complete", "hi", "--address", "127.0.0.1:1"], "Nothing answers at 127.0.0.1:1", "UNREACHABLE"),
    (["bench", "throughput", "--num-prompts", "0"], "--num-prompts is less than 1", "BAD_VALUE"),
    (["bench", "serve", "--max-concurrency=-1"], "--max-concurrency is less than 0", "BAD_VALUE"),
    (["up", "--port", "70000"], "port is 70000", "BAD_VALUE"),
    (["logs", "nothing"], "There is no 'nothing'", "UNKNOWN_SERVICE"),
    (["restart"], "Say what to restart", "NOTHING_TO_RESTART"),
    (["restart", "worker", "--rolling"], "Say what to restart", "NOTHING_TO_RESTART"),
    (["restart", "worker"], "No stack named 'default' runs here", "NOT_RUNNING"),
    (["serve", "--replicas", "0"], "replicas is 0", "BAD_VALUE"),
    (["up", "--tokenizers", "1000"], "tokenizers is 1000", "BAD_VALUE"),
    (["up", "--prefill", "2"], "There are prefill replicas, and none to decode", "ROLE_ALONE"),
    (["up", "--decode", "2", "--replicas", "0"], "There are decode replicas, and none to prefill", "ROLE_ALONE"),
    (["up", "--prefill", "-1", "--decode", "1"], "prefill is -1", "BAD_VALUE"),
    (["status", "--name", "../x"], "not a name for a stack", "BAD_NAME"),
]


@pytest.mark.parametrize(("argv", "message", "code"), BAD, ids=[ascii(" ".join(case[0])) for case in BAD])
def test_bad_input_is_a_headline_with_a_fix(argv: list[str], message: str, code: str, capsys: Capture) -> None:
    assert main(argv) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert message in error.splitlines()[0]
    assert f"  code    {code}\n" in error
    assert "  fix     " in error


def test_complete_prints_text_and_timings(fake: Fake, capsys: Capture) -> None:
    _, address = fake
    for extra in ([], ["--stream"]):
        assert main(["complete", "hi", "--address", address, "--max-tokens", "3", "--timings", *extra]) == 0
        captured = capsys.readouterr()
        assert captured.out == "0 1 2 \n"
        assert "worker" in captured.err
        assert "decode" in captured.err


def test_complete_takes_the_key_from_the_environment(fake: Fake, monkeypatch: pytest.MonkeyPatch) -> None:
    router, address = fake
    monkeypatch.setenv("QUIRE_API_KEY", "k")
    assert main(["complete", "hi", "--address", address]) == 0
    assert router.metadata[0]["authorization"] == "Bearer k"


def test_bench_throughput_prints_json(fake: Fake, capsys: Capture) -> None:
    _, address = fake
    argv = ["bench", "throughput", "--address", address, "--num-prompts", "5", "--input-len", "4", "--output-len", "3"]
    assert main(argv) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["num_requests"], report["output_tokens"], report["total_num_tokens"]) == (5, 15, 35)
    assert report["tokens_per_second"] > 0


def test_bench_latency_asks_batch_after_batch(fake: Fake, capsys: Capture) -> None:
    router, address = fake
    sizes = ["--input-len=4", "--output-len=3", "--batch-size=2", "--num-iters-warmup=1", "--num-iters=3"]
    assert main(["bench", "latency", "--address", address, *sizes]) == 0
    report = json.loads(capsys.readouterr().out)
    assert len(report["latencies"]) == 3 and min(report["latencies"]) > 0
    assert report["avg_latency"] == pytest.approx(sum(report["latencies"]) / 3)
    assert report["percentiles"]["50"] == sorted(report["latencies"])[1]
    assert [(request.max_tokens, request.ignore_eos) for request in router.requests] == [(3, True)] * 8
    assert len({request.token_ids.ids for request in router.requests}) == 8  # no cache helps


def test_bench_startup_starts_anew_each_time(fake: Fake, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    router, address = fake
    monkeypatch.setattr("quire.cli.benches.startup.open_llm", lambda args: LLM(address=address))
    assert main(["bench", "startup", "--num-iters", "2"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert len(report["ready_s"]) == len(router.requests) == 2
    assert all(0 < ready < first for ready, first in zip(report["ready_s"], report["first_token_s"], strict=True))
    assert main(["bench", "startup", "--address", address]) != 0
    assert "has started already" in capsys.readouterr().err


def test_nothing_runs(capsys: Capture) -> None:
    assert main(["status"]) == 1
    assert main(["status", "--json"]) == 1
    assert main(["down"]) == 0
    out = capsys.readouterr().out
    assert "`quire up` starts it" in out
    assert '"phase": "not running"' in out


def test_logs_are_merged_by_time_and_readable(capsys: Capture) -> None:
    directory = StateDirectory("default")
    directory.create()
    lines = {
        "worker": '{"time": "2026-01-01T00:00:02.5Z", "level": "error", "message": "second", "code": "X"}\nplain\n',
        "router": '{"time": "2026-01-01T00:00:01Z", "level": "info", "message": "first", "port": 3}\n',
        "supervisor": f'{{"ts": {time.time()}, "event": "ready"}}\n',
    }
    for service, text in lines.items():
        directory.log(service).write_text(text)
    assert main(["logs"]) == 0
    out = capsys.readouterr().out
    assert out.index("first") < out.index("second") < out.index("ready")
    assert "port=3" in out
    assert main(["logs", "worker", "-n", "1"]) == 0
    assert "second" in capsys.readouterr().out
    assert main(["logs", "router", "--raw"]) == 0
    assert '{"time":' in capsys.readouterr().out


def test_a_table_is_aligned() -> None:
    assert table(["a", "bb"], [["ccc", "1"], ["d", "22"]], right=(1,)) == "a    bb\nccc   1\nd    22"


@pytest.mark.parametrize(("share", "full"), [(0.0, 0), (0.5, 4), (1.0, 8), (7.0, 8), (-1.0, 0)])
def test_a_bar(share: float, full: int) -> None:
    assert bar(share, 8) == ("█" * full).ljust(8)
    assert bar(0.0001, 8).strip() == "▏"


def test_timings_are_grouped_in_the_order_of_the_hops() -> None:
    timings = [
        HopTiming("worker", "decode", 5000, 10),
        HopTiming("router", "admit", 1000, 1),
        HopTiming("x", "y", 1, 0),
    ]
    header, *rows = timing_table(timings, 0.01).splitlines()
    assert header.split()[:4] == ["hop", "phase", "count", "ms"]
    assert [row.split()[0] for row in rows] == ["router", "worker", "x"]
    assert rows[1].split()[1:6] == ["decode", "10", "5.00", "0.50", "50.0%"]
    assert timing_table([], 1.0) == "(the router gave no timings)"


def test_progress_without_a_terminal_is_a_line_per_phase() -> None:
    stream = io.StringIO()
    lines = ProgressLines(SERVICES, stream)
    for service in SERVICES:
        lines(events.Progress(service, "starting", 0.0))
    for share in (0.1, 0.2):
        lines(events.Progress("worker", "weights", 1.0, share, "a.safetensors"))
    for service in SERVICES:
        lines(events.Progress(service, "ready", 2.0))
    lines(events.Ready("http://a", "b", 2.0))
    lines(events.Died("router", "C", "the cause", "the fix", "/log", 0.25))
    lines(events.Progress("router", "ready", 3.0))
    lines(events.Restarted("router", 2))
    lines(events.Died("kvstore", "C", "another", "the fix", "/log"))
    text = stream.getvalue()
    assert text.count("weights") == 1
    assert "10%  a.safetensors" in text
    assert text.count("ready") == len(SERVICES)
    assert "the router died: the cause" in text
    assert "started again in 0.2 s" in text
    assert "the router serves again, restarted 2 times" in text
    assert "stays down" in text
    assert "\x1b" not in text


def test_progress_on_a_terminal_redraws_its_lines() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    lines = ProgressLines(SERVICES, stream)
    lines(events.Progress("worker", "starting", 0.0))
    lines(events.Progress("worker", "ready", 1.0))
    assert stream.getvalue().count(f"\x1b[{len(SERVICES)}A") == 1
