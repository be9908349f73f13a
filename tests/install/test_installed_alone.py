"""Each torch-free service, installed alone into an empty environment: starts fast, stays small, needs nothing else.

Takes minutes and the package index, so it has a target of its own: `make test-install`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
import venv
from pathlib import Path

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quire.local.ports import free_ports
from tools.build_wheels import build_wheels

ROOT = Path(__file__).resolve().parents[2]
START_LIMIT_S = 3.0
RESIDENT_LIMIT_BYTES = 120 * 1_000_000
Status = health_pb2.HealthCheckResponse
# The scheduler and the router open their ports at once, and serve when their peers do.
SERVICES = {
    "tokenizer": (["--model", str(ROOT / "models" / "demo")], Status.SERVING),
    "kvstore": ([], Status.SERVING),
    "scheduler": (["--worker", "127.0.0.1:1"], Status.NOT_SERVING),
    "router": (["--port", "0", "--schedulers", "127.0.0.1:1", "--tokenizers", "127.0.0.1:1"], Status.NOT_SERVING),
}

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of our own wheels, built once."""
    target = tmp_path_factory.mktemp("wheels")
    build_wheels(ROOT, target)
    return target


@pytest.mark.parametrize("name", SERVICES)
def test_starts_fast_and_stays_small(name: str, wheels: Path, tmp_path: Path) -> None:
    home = tmp_path / "venv"
    venv.create(home, with_pip=True)
    python = str(home / "bin" / "python")
    # By their files, as users must: an index may have a package of one of these names.
    ours = [str(next(wheels.glob(f"{each}-*.whl"))) for each in ("quire", "quire_common", f"quire_{name}")]
    install = [python, "-m", "pip", "install", "-q", "-c", str(wheels / "constraints.txt")]
    subprocess.run([*install, *ours], check=True, cwd=tmp_path)
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "QUIRE"))}
    torch = [python, "-c", "import torch"]
    found = subprocess.run(torch, capture_output=True, cwd=tmp_path, env=environment, check=False)
    assert found.returncode, f"installing the {name} brought torch along"

    flags, wanted = SERVICES[name]
    (port,) = free_ports(1)
    command = [python, "-m", f"quire_{name}", "--listen", f"127.0.0.1:{port}", *flags]
    warm = [python, "-c", f"import quire_{name}.server"]  # byte code is written once
    subprocess.run(warm, check=True, cwd=tmp_path, env=environment)
    began = time.monotonic()
    process = subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        with grpc.insecure_channel(f"127.0.0.1:{port}", [("grpc.max_reconnect_backoff_ms", 50)]) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            while (status := _status(stub)) != wanted:
                assert process.poll() is None, process.communicate()[1]
                assert time.monotonic() - began < 30, f"{name} is {status}"
        started_s = time.monotonic() - began
        time.sleep(1.0)  # idle
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        resident = sum(member.memory_info().rss for member in family)
        print(f"{name}: {started_s:.2f} s to {Status.ServingStatus.Name(wanted)}, {resident / 1e6:.0f} MB resident")
        assert started_s < START_LIMIT_S
        assert resident < RESIDENT_LIMIT_BYTES
    finally:
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=40)
    assert process.returncode == 0, errors


def _status(stub: health_pb2_grpc.HealthStub) -> int:
    try:
        status: int = stub.Check(health_pb2.HealthCheckRequest(), timeout=5, wait_for_ready=True).status
        return status
    except grpc.RpcError:
        return int(Status.UNKNOWN)
