"""A stack whose services talk under mutual TLS: the supervisor and the commands reach it, and strangers do not."""

from __future__ import annotations

import json
import ssl
import subprocess
import sys
from pathlib import Path

import grpc
import httpx
import pytest

from quire.__main__ import main
from quire.local.service_tls import sync_channel
from quire.local.state import StateDirectory
from quire.v1 import scheduler_pb2, scheduler_pb2_grpc
from tests.pipeline.leftovers import assert_nothing_left

Capture = pytest.CaptureFixture[str]
NAME = "secured"
LIMIT_S = 120.0


def stdout(*command: str) -> str:
    """Run `quire` in a process of its own, and return what it prints."""
    whole = [sys.executable, "-m", "quire", *command, "--name", NAME]
    done = subprocess.run(whole, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_commands_reach_a_stack_under_mutual_tls(tmp_path: Path, demo_model: Path) -> None:
    folder = str(tmp_path / "certs")
    assert main(["certs", folder]) == 0

    stdout("up", "--model", str(demo_model), "--tls-folder", folder, "--port", "0", "--shutdown-timeout", "5")
    state = StateDirectory(NAME).read()
    assert state is not None
    try:
        assert state.http.startswith("https://")
        context = ssl.create_default_context(cafile=f"{folder}/public-ca.pem")
        assert httpx.get(f"{state.http}/health", verify=context).status_code == 200
        assert stdout("complete", "ROMEO:", "--max-tokens", "4").strip()
        assert "both" in stdout("role") and "no answer" not in stdout("role")
        assert "was both" in stdout("role", "scheduler", "prefill")
        assert json.loads(stdout("status", "--json"))["phase"] == "ready"
        address = f"127.0.0.1:{state.services['scheduler'].port}"
        with sync_channel(address, "scheduler", "") as plain, pytest.raises(grpc.RpcError) as caught:
            stub = scheduler_pb2_grpc.SchedulerStub(plain)
            stub.GetModelInfo(scheduler_pb2.GetModelInfoRequest(), timeout=20)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    finally:
        stdout("down")
    assert_nothing_left(state)


def test_a_folder_without_a_certificate_is_refused_before_anything_starts(tmp_path: Path, capsys: Capture) -> None:
    assert main(["certs", str(tmp_path)]) == 0
    (tmp_path / "worker.key").unlink()
    assert main(["up", "--name", NAME, "--tls-folder", str(tmp_path)]) == 1
    told = capsys.readouterr().err
    assert "TLS_FOLDER" in told and "worker.key" in told
