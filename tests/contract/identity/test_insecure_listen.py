"""No service opens a port to other hosts without TLS, unless it is told to."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from quire_common.config import ServiceConfig
from quire_common.errors import ConfigError
from quire_common.identity.exposure import is_loopback, require_private
from quire_worker.config import WorkerConfig
from quire_worker.kv_transfer.peers.peer_listeners import PeerListeners
from tests.certificates import Authority

LIMIT_S = 60.0
EVERYWHERE = "--listen=0.0.0.0:0"
MODEL = str(Path(__file__).resolve().parents[3] / "models" / "demo")
# What each service needs to get as far as its ports.
NEEDS = {
    "router": ["--port=0", "--schedulers=127.0.0.1:1", "--tokenizers=127.0.0.1:1"],
    "tokenizer": [f"--model={MODEL}"],
    "scheduler": ["--worker=127.0.0.1:1"],
    "worker": [f"--model={MODEL}"],
    "kvstore": ["--ram-bytes=67108864"],
}


def command(service: str, *flags: str) -> list[str]:
    return [sys.executable, "-m", f"quire_{service}", *NEEDS[service], *flags]


def refusal(service: str, *flags: str) -> dict[str, str]:
    """The error with which the service ends."""
    done = subprocess.run(command(service, *flags), capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 2, done.stderr
    told: dict[str, str] = json.loads(done.stderr.splitlines()[-1])
    return told


def listens(service: str, *flags: str) -> bool:
    """Whether the service opens its port."""
    with subprocess.Popen(command(service, *flags), stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        found = any(json.loads(line).get("message") == "listening" for line in process.stderr)
        process.send_signal(signal.SIGTERM)
        process.stderr.read()
    return found


@pytest.mark.parametrize("service", NEEDS)
def test_listening_for_other_hosts_needs_tls_or_the_flag(service: str, tmp_path: Path) -> None:
    told = refusal(service, EVERYWHERE)
    assert told["code"] == "INSECURE_LISTEN"
    assert "--listen" in told["error"] and "0.0.0.0" in told["error"] and "without TLS" in told["error"]
    assert "--tls-cert" in told["fix"] and "--insecure" in told["fix"]
    own = Authority(tmp_path).files(service, service)
    if service != "worker":  # its start is long
        assert listens(service, EVERYWHERE, "--insecure")
        assert listens(service, EVERYWHERE, f"--tls-cert={own.cert}", f"--tls-key={own.key}", f"--tls-ca={own.ca}")


@pytest.mark.deep
@pytest.mark.parametrize(
    ("service", "flags", "option"),
    [
        ("router", ["--host=0.0.0.0"], "--host"),
        ("router", ["--metrics-listen=0.0.0.0:0"], "--metrics-listen"),
        ("tokenizer", ["--metrics-listen=0.0.0.0:0"], "--metrics-listen"),
        (
            "scheduler",
            ['--kv-events-config={"enable_kv_cache_events": true, "endpoint": "tcp://*:0"}'],
            "--kv-events-config",
        ),
    ],
)
def test_other_ports_are_refused_too(service: str, flags: list[str], option: str) -> None:
    told = refusal(service, *flags)
    assert told["code"] == "INSECURE_LISTEN" and option in told["error"]


def test_the_port_of_pages_over_grpc_is_refused_too(tmp_path: Path) -> None:
    config = {"listen": "127.0.0.1:7", "peer_transport": "grpc", "peer_grpc_listen": "0.0.0.0:0"}
    with pytest.raises(ConfigError, match="--peer-grpc-listen") as caught:
        PeerListeners(WorkerConfig(**config))  # type: ignore[arg-type]  # flags are strings here
    assert caught.value.code == "INSECURE_LISTEN"
    own = Authority(tmp_path).files("worker", "worker")
    for more in ({"insecure": True}, {"tls_cert": own.cert, "tls_key": own.key}):
        PeerListeners(WorkerConfig(**config, **more)).close()  # type: ignore[arg-type]  # the same


def test_only_this_host_reaches_loopback_addresses() -> None:
    for host in ("127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1", "localhost"):
        assert is_loopback(host)
        require_private(ServiceConfig(), host, "listen", secured=False)
    for host in ("0.0.0.0", "::", "10.0.0.1", "::ffff:10.0.0.1", "*", "", "example.org", "localhost.example.org"):
        assert not is_loopback(host)
        with pytest.raises(ConfigError):
            require_private(ServiceConfig(), host, "listen", secured=False)
        require_private(ServiceConfig(), host, "listen", secured=True)
        require_private(ServiceConfig(insecure=True), host, "listen", secured=False)
