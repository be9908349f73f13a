"""Liveness and readiness of each service, over gRPC and HTTP: a process that cannot work yet lives all the same."""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from quire_common.serving.health import LIVENESS, READINESS
from tests.held_ports import held_ports

LIMIT_S = 60.0
MODEL = str(Path(__file__).resolve().parents[2] / "models" / "demo")
Status = health_pb2.HealthCheckResponse


@dataclass(frozen=True)
class Probed:
    """A service, and where its probes are."""

    process: subprocess.Popen[bytes]
    grpc: str
    http: str

    def status(self, name: str) -> int:
        """What grpc.health.v1 says of the name."""
        with grpc.insecure_channel(self.grpc) as channel:
            request = health_pb2.HealthCheckRequest(service=name)
            stub = health_pb2_grpc.HealthStub(channel)
            return int(stub.Check(request, timeout=LIMIT_S, wait_for_ready=True).status)

    def get(self, path: str) -> tuple[int, object]:
        """Status and body of a GET."""
        try:
            with urllib.request.urlopen(f"http://{self.http}{path}", timeout=LIMIT_S) as answer:
                return answer.status, json.loads(answer.read())
        except urllib.error.HTTPError as error:
            return error.code, json.loads(error.read())

    def live(self) -> bool:
        """Whether both say that the process lives; they must agree."""
        live, answer = self.status(LIVENESS) == int(Status.SERVING), self.get("/livez")
        assert answer == (200 if live else 503, {"live": live})
        return live

    def ready(self, service: str) -> bool:
        """Whether the service is ready, by all names and by HTTP; they must agree."""
        told = {self.status(name) for name in (READINESS, "", service)}
        code, body = self.get("/readyz")
        ready = told == {Status.SERVING}
        assert ready or told == {Status.NOT_SERVING}
        assert isinstance(body, dict) and (code, body["ready"]) == ((200, True) if ready else (503, False))
        return ready

    def until(self, service: str, *, ready: bool) -> None:
        """Wait for the readiness; the two ways may differ in between, and the process lives all the while."""
        deadline = time.monotonic() + LIMIT_S
        wanted = Status.SERVING if ready else Status.NOT_SERVING
        while self.status(service) != wanted or self.get("/readyz")[0] != (200 if ready else 503):
            assert self.live() and time.monotonic() < deadline
            time.sleep(0.05)
        assert self.ready(service) is ready


@contextlib.contextmanager
def running(name: str, *flags: str, ports: Sequence[int] = ()) -> Iterator[Probed]:
    listen, metrics = ports or held_ports(2)
    command = [sys.executable, "-m", f"quire_{name}", "--listen", f"127.0.0.1:{listen}"]
    command += ["--metrics-listen", f"127.0.0.1:{metrics}", *flags]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    probed = Probed(process, f"127.0.0.1:{listen}", f"127.0.0.1:{metrics}")
    try:
        deadline = time.monotonic() + LIMIT_S
        while not _open(probed):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        yield probed
    finally:
        process.send_signal(signal.SIGCONT)
        process.send_signal(signal.SIGTERM)
        assert process.wait(LIMIT_S) == 0


def _open(probed: Probed) -> bool:
    with contextlib.suppress(urllib.error.URLError, OSError):
        probed.get("/livez")
        return True
    return False


@pytest.mark.parametrize(
    ("name", "service", "flags"),
    [
        ("tokenizer", "quire.v1.Tokenizer", ("--model", MODEL)),
        ("kvstore", "quire.v1.KvStore", ("--drain-delay-s", "3")),
        ("worker", "quire.v1.Worker", ("--paced", "1", "--model", MODEL, "--drain-delay-s", "3")),
    ],
)
def test_a_service_is_ready_when_it_has_started(name: str, service: str, flags: tuple[str, ...]) -> None:
    with running(name, *flags) as probed:
        probed.until(service, ready=True)
        assert probed.live()
        if "--drain-delay-s" in flags:
            probed.process.send_signal(signal.SIGTERM)
            probed.until(service, ready=False)  # it leaves, and lives meanwhile
            assert probed.live()


def test_scheduler_and_router_live_without_what_they_depend_on() -> None:
    """A probe of liveness must not restart a scheduler whose worker still loads, nor a router without replicas."""
    service, public = "quire.v1.Scheduler", "quire.v1.Inference"
    free = held_ports(8)  # at once: none comes twice
    worker_ports, tokenizer_ports, scheduler_ports, router_ports = (free[at : at + 2] for at in (0, 2, 4, 6))
    behind = ["--schedulers", f"127.0.0.1:{scheduler_ports[0]}", "--tokenizers", f"127.0.0.1:{tokenizer_ports[0]}"]
    with contextlib.ExitStack() as stack:
        worker = f"127.0.0.1:{worker_ports[0]}"
        scheduler = stack.enter_context(running("scheduler", "--worker", worker, ports=scheduler_ports))
        router = stack.enter_context(running("router", "--port", "0", *behind, ports=router_ports))
        time.sleep(0.5)
        for probed, name in ((scheduler, service), (router, public)):
            assert probed.live() and not probed.ready(name)
        with running("worker", "--paced", "1", "--model", MODEL, ports=worker_ports):
            scheduler.until(service, ready=True)
            assert router.live() and not router.ready(public)
            with running("tokenizer", "--model", MODEL, ports=tokenizer_ports):
                router.until(public, ready=True)
            router.until(public, ready=False)
        scheduler.until(service, ready=False)
        assert scheduler.live() and router.live()
