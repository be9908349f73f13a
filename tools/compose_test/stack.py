"""ComposeStack: a compose stack of deploy/compose, started by podman-compose."""

from __future__ import annotations

import os
import signal
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import yaml

from quire.local.ports import free_ports
from tools.images.base import debian_server
from tools.images.podman import address_of, environment, podman, process_of, volume_folder

ROOT: Final = Path(__file__).resolve().parents[2]
FILE: Final = ROOT / "deploy" / "compose" / "compose.yaml"
PROJECT: Final = "quire-compose-test"
READY_LIMIT_S: Final = 300.0
METRICS_PORT: Final = 9100
_NOT_OURS: Final = ("redis", "balancer", "prometheus")
_PORTS: Final = ("QUIRE_PORT", "QUIRE_PORT_2", "QUIRE_BALANCER_PORT", "QUIRE_PROMETHEUS_PORT")


class ComposeStack:
    """A stack of one or more profiles. It uses free ports of this host, and its volumes are removed with it."""

    def __init__(self, profiles: Sequence[str], settings: dict[str, str]) -> None:
        self._profiles = [word for name in profiles for word in ("--profile", name)]
        ports = dict(zip(_PORTS, map(str, free_ports(len(_PORTS))), strict=True))
        self._settings = {
            **ports,
            "QUIRE_REDIS_IMAGE": debian_server("redis"),
            "QUIRE_HAPROXY_IMAGE": debian_server("haproxy"),
            "QUIRE_PROMETHEUS_IMAGE": debian_server("prometheus"),
            **settings,
        }
        found: dict[str, Any] = yaml.safe_load(FILE.read_text())["services"]
        wanted = {*profiles}
        names = [name for name, service in found.items() if {*service.get("profiles", wanted)} & wanted]
        self.services = names

    def url(self, port: str = "QUIRE_PORT", scheme: str = "https") -> str:
        """Return the address at which this host reaches a published port, by the name of its setting."""
        return f"{scheme}://localhost:{self._settings[port]}"

    def up(self) -> None:
        """Make the secrets and start all containers. Raises CalledProcessError."""
        self.secret("make")
        self._compose("up", "--detach")

    def down(self) -> None:
        """Remove containers, networks and volumes."""
        self._compose("down", "--volumes", "--timeout", "1", check=False)

    def secret(self, what: str) -> str:
        """Return the output of the service `secrets`. At the first call, podman-compose prints networks before it."""
        return self._compose("--profile", "setup", "run", "--rm", "-T", "secrets", what).strip()

    def wait_ready(self, services: Sequence[str] = ()) -> None:
        """Wait until each service is ready. Raises TimeoutError with the end of a log."""
        for service in services or self.services:
            self._wait(service, self._is_ready)

    def check_health(self) -> None:
        """Run the health check of each container, since podman does not run it without systemd. Raises TimeoutError."""
        for service in self.services:
            self._wait(service, self._is_healthy)

    def _wait(self, service: str, holds: Callable[[str], bool]) -> None:
        deadline = time.monotonic() + READY_LIMIT_S
        while not holds(service):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{service} is not ready after {READY_LIMIT_S} s: {self.log(service)}")
            time.sleep(0.5)

    def kill(self, service: str) -> None:
        """Kill the container's processes, as a crash would. podman's own `kill` would count as a stop by the operator.
        Raises RuntimeError for a container that does not run."""
        if not (process := process_of(self.container(service))):
            raise RuntimeError(f"{service} does not run")
        os.kill(process, signal.SIGKILL)

    def restart(self, service: str) -> None:
        """Stop the container, which may drain, and start it again; return when it is ready."""
        self._compose("restart", "--timeout", "45", service)
        self.wait_ready([service])

    def log(self, service: str) -> str:
        """Return the end of the service's log."""
        done = podman("logs", "--tail", "8", self.container(service), check=False)
        return (done.stdout + done.stderr)[-3000:]

    def metrics(self, service: str) -> str:
        """The metrics of a service other than the router, which asks for a key. Raises OSError."""
        return self._ask(service, "/metrics")

    def container(self, service: str) -> str:
        """Return the name that podman-compose gives the service's container."""
        return f"{PROJECT}_{service}_1"

    def _is_ready(self, service: str) -> bool:
        """Whether the service is ready, by /readyz of its metrics port. A health check would take longer to start."""
        container = self.container(service)
        if not process_of(container):
            return False
        if service in _NOT_OURS:
            return self._is_healthy(service)
        try:
            self._ask(service, "/readyz")
        except OSError:  # HTTPError is one
            return False
        return True

    def _ask(self, service: str, path: str) -> str:
        """What the metrics port answers to Prometheus: no service may read another's metrics, nor its own. Raises
        OSError, also for a status other than 200."""
        url = f"https://{address_of(self.container(service))}:{METRICS_PORT}{path}"
        with urllib.request.urlopen(url, timeout=5, context=self._as_metrics()) as answer:
            return str(answer.read().decode())

    def _is_healthy(self, service: str) -> bool:
        return podman("healthcheck", "run", self.container(service), check=False).returncode == 0

    def _as_metrics(self) -> ssl.SSLContext:
        """Return the credentials of Prometheus, for both authorities. Certificates do not contain the addresses of
        containers."""
        folder = volume_folder(f"{PROJECT}_metrics-secrets")
        context = ssl.create_default_context(cafile=str(folder / "ca.pem"))
        context.load_verify_locations(folder / "public-ca.pem")
        context.load_cert_chain(folder / "tls.pem", folder / "tls.key")
        context.check_hostname = False
        return context

    def _compose(self, *arguments: str, check: bool = True) -> str:
        program = str(Path(sys.executable).with_name("podman-compose"))
        command = [program, "--project-name", PROJECT, "--file", str(FILE), *self._profiles, *arguments]
        done = subprocess.run(
            command, env=environment() | self._settings, capture_output=True, text=True, timeout=600, check=False
        )
        if check and done.returncode:
            error = subprocess.CalledProcessError(done.returncode, command, done.stdout, done.stderr)
            error.add_note(done.stdout[-2000:] + done.stderr[-4000:])
            raise error
        return done.stdout
