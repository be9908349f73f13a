"""The commands, as a user types them, over the five real processes."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from quire.local.spec import SERVICES
from quire.local.state import StateDirectory, list_names
from tests.pipeline.leftovers import (
    assert_nothing_left,
    listening_ports,
    ports_of,
    processes_of,
    processes_with,
    read_state,
)

LIMIT_S = 180


def quire(*argv: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "quire", *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)


@contextmanager
def ended(process: subprocess.Popen[str]) -> Iterator[None]:
    """A test that fails must not wait for a process that nobody ends."""
    try:
        yield
    finally:
        process.kill()


def test_cli_starts_uses_and_stops_a_stack(demo_model: Path) -> None:
    up = quire("up", "--model", str(demo_model), "--port", "0", "--name", "test", "--served-model-name", "bard")
    assert up.returncode == 0, up.stderr
    state = read_state()
    for service in SERVICES:
        assert re.search(rf"{service} +ready", up.stdout)
    assert len(processes_of(state.stack_id)) >= len(SERVICES)
    assert ports_of(state) <= listening_ports()

    (curl,) = (line.strip() for line in up.stdout.splitlines() if line.strip().startswith("curl "))
    answer = subprocess.run(shlex.split(curl), capture_output=True, text=True, timeout=LIMIT_S, check=True)
    assert json.loads(answer.stdout)["model"] == "bard"
    assert json.loads(answer.stdout)["choices"][0]["text"]

    status = quire("status", "--name", "test", "--json")
    report = json.loads(status.stdout)
    assert status.returncode == 0
    assert {service: body["phase"] for service, body in report["services"].items()} == dict.fromkeys(SERVICES, "ready")
    assert all(body["resident_mb"] > 10 for body in report["services"].values())
    assert "router" in quire("status", "--name", "test").stdout

    flags = ["--max-tokens", "8", "--temperature", "0"]
    whole = quire("complete", "ROMEO:", "--name", "test", *flags)
    streamed = quire("complete", "ROMEO:", "--name", "test", "--stream", "--timings", *flags)
    assert whole.returncode == 0, whole.stderr
    assert streamed.stdout == whole.stdout
    for service in ("router", "tokenizer", "scheduler", "worker"):
        assert service in streamed.stderr

    assert "ready" in quire("logs", "worker", "--name", "test").stdout
    again = quire("up", "--model", str(demo_model), "--port", "0", "--name", "test")
    assert again.returncode == 1
    assert "quire down --name test" in again.stderr

    down = quire("down", "--name", "test")
    assert down.returncode == 0
    assert "Stopped" in down.stdout
    assert_nothing_left(state)
    assert "not running" in quire("down", "--name", "test").stdout
    assert quire("status", "--name", "test").returncode == 1


@pytest.mark.deep
def test_status_tells_of_killed_and_restarted_services(demo_model: Path) -> None:
    up = quire("up", "--model", str(demo_model), "--port", "0", "--name", "test", "--tokenizers", "2")
    assert up.returncode == 0, up.stderr
    state = read_state()
    try:
        os.kill(state.services["kvstore"].pid, signal.SIGKILL)
        deadline = time.monotonic() + LIMIT_S
        while read_state().services["kvstore"].restarts == 0 or quire("status", "--name", "test").returncode:
            assert time.monotonic() < deadline
        restart = quire("restart", "tokenizer", "--name", "test")
        assert restart.returncode == 0, restart.stderr
        assert "tokenizer-2: restarted in" in restart.stdout
        report = json.loads(quire("status", "--name", "test", "--json").stdout)
        restarts = {name: body["restarts"] for name, body in report["services"].items()}
        assert [name for name, count in restarts.items() if count] == ["tokenizer-2", "tokenizer-1", "kvstore"]
        assert "tokenizer-1" in quire("logs", "tokenizer", "--name", "test").stdout
        assert quire("complete", "ROMEO:", "--name", "test", "--max-tokens", "2").returncode == 0
    finally:
        assert quire("down", "--name", "test", "--timeout", "5").returncode == 0
    assert_nothing_left(state)


@pytest.mark.deep
def test_serve_stops_in_order_on_sigint(demo_model: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "quire",
        "serve",
        str(demo_model),
        "--port",
        "0",
        "--name",
        "test",
        "--api-key",
        "k",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as serve, ended(serve):
        assert serve.stdout is not None
        assert serve.stderr is not None
        for line in serve.stdout:
            if "Ctrl-C" in line:
                break
        state = read_state()
        body = {"prompt": "x", "max_tokens": 2}
        assert httpx.post(f"{state.http}/v1/completions", json=body, timeout=60).status_code == 401
        good = httpx.post(f"{state.http}/v1/completions", json=body, headers={"Authorization": "Bearer k"}, timeout=60)
        assert good.status_code == 200
        serve.send_signal(signal.SIGINT)
        assert serve.wait(LIMIT_S) == 0
        assert serve.stderr.read() == ""
    assert_nothing_left(state)


@pytest.mark.deep
def test_demo_ends_by_itself_and_leaves_nothing(demo_model: Path, state_dir: Path) -> None:
    demo = quire("demo", "--model", str(demo_model))
    assert demo.returncode == 0, demo.stderr
    for service in SERVICES:
        assert re.search(rf"^{service} .*%", demo.stdout, re.MULTILINE), f"no timings of the {service}"
    assert re.search(r"[1-9][0-9]* of [0-9]+ prompt tokens from cache", demo.stdout)
    assert list_names(state_dir) == []
    assert processes_with("QUIRE_STATE_DIR", str(state_dir)) == []


@pytest.mark.deep
def test_failed_start_of_a_stack_names_the_cause(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    up = quire("up", "--model", str(tmp_path / "model"), "--port", "0", "--name", "test")
    assert up.returncode == 1
    headline = up.stderr.splitlines()[0]
    assert headline.startswith("error: the ")
    assert "  fix     " in up.stderr
    assert "  log     " in up.stderr
    state = StateDirectory("test").read()
    assert state is not None
    assert_nothing_left(state)


@pytest.mark.deep
def test_bench_throughput_prints_json(demo_model: Path) -> None:
    argv = ["--model", str(demo_model), "--num-prompts", "8", "--input-len", "32", "--output-len", "16"]
    done = quire("bench", "throughput", *argv, "--max-num-seqs", "8")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["num_requests"], report["output_tokens"]) == (8, 128)
    assert report["output_tokens_per_second"] > 0
