"""The rendered pods run, restart one after the other under load, and no client notices.

Needs root, podman with runc, and the images of `make images`."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from quire.local.ports import free_ports
from tests.chaos.routers.envoy import Envoy, envoy_binary, run_envoy
from tests.kube.callers import CLIENTS, ROUTES, Callers
from tests.kube.chart import CHART, NAMESPACE, RELEASE, ROOT, Manifest, pods_of, render
from tests.kube.gateway import config_of
from tests.kube.podman_pods import PodmanPod, podman
from tools.images.podman import image_exists

pytestmark = pytest.mark.slow
SUBNET = os.environ.get("QUIRE_KUBE_SUBNET", "10.213.7")
NETWORK = "quire-kube"
# Names that a cluster's DNS would know, by component.
SERVICES = {
    "tokenizer": f"{RELEASE}-tokenizer.{NAMESPACE}.svc",
    "engine": f"{RELEASE}-scheduler.{NAMESPACE}.svc",
    "kvstore": f"{RELEASE}-kvstore.{NAMESPACE}.svc",
    "redis": f"{RELEASE}-redis",
}
FIRST_KVSTORE = f"{RELEASE}-kvstore-0.{RELEASE}-kvstore.{NAMESPACE}.svc"
VALUES = {
    "model": {
        "path": "/models/demo",
        "name": "demo",
        "volume": {"hostPath": {"path": str(ROOT / "models"), "type": "Directory"}},
        "hub": {"enabled": False},
    },
    "pools": [{"name": "cpu", "options": {"worker": {"kv-cache-memory-bytes": 67_108_864}}}],
    "router": {"replicas": 2},
    "tokenizer": {"replicas": 2},
    "redis": {"image": os.environ.get("QUIRE_REDIS_IMAGE", "localhost/quire/redis:bookworm")},
    "gateway": {**ROUTES, "retries": 3},
    # The machine of a test is slower than a cluster.
    "drain": {"timeoutSeconds": 60, "marginSeconds": 30},
}


@pytest.fixture(scope="module")
def manifests() -> list[Manifest]:
    """The rendered release, if this machine can run it."""
    if not os.environ.get("QUIRE_KUBE_PODS"):
        pytest.skip("QUIRE_KUBE_PODS=1 runs it: fifteen containers for five minutes")
    if os.getuid() != 0 or not shutil.which("podman"):
        pytest.skip("pods need root and podman")
    if not envoy_binary():
        pytest.skip("there is no Envoy: `make kube` fetches it")
    found = render(CHART / "values-cpu.yaml", values=VALUES)
    for image in sorted({each["image"] for pods in pods_of(found) for each in pods.containers}):
        if not image_exists(image):
            pytest.skip(f"there is no image {image}: `make images` builds it")
    return found


@contextlib.asynccontextmanager
async def cluster(manifests: list[Manifest], folder: Path) -> AsyncIterator[dict[str, list[PodmanPod]]]:
    """All pods of the release, ready, by component."""
    names: dict[str, list[str]] = {}
    pods: dict[str, list[PodmanPod]] = {}
    for each in pods_of(manifests):
        for number in range(each.workload["spec"]["replicas"]):
            address = f"{SUBNET}.{10 + sum(map(len, pods.values()))}"
            pod = PodmanPod(f"{RELEASE}-{each.component}-{number}", address, each, NETWORK, folder, names)
            pods.setdefault(each.component, []).append(pod)
            if each.component in SERVICES:
                names.setdefault(SERVICES[each.component], []).append(address)
            if (each.component, number) == ("kvstore", 0):
                names[FIRST_KVSTORE] = [address]
    everything = [pod for component in ("redis", "kvstore", "engine", "tokenizer", "router") for pod in pods[component]]
    for pod in everything:
        await pod.remove()
    await podman("network", "rm", "--force", NETWORK, check=False)
    await podman("network", "create", "--subnet", f"{SUBNET}.0/24", NETWORK)
    try:
        for pod in everything:
            await pod.start()
        for pod in everything:
            await pod.wait_ready()
        yield pods
    finally:
        for pod in everything:
            await pod.remove()
        await podman("network", "rm", "--force", NETWORK, check=False)


async def test_a_rolling_restart_of_all_rendered_pods_costs_no_answer(
    manifests: list[Manifest], tmp_path: Path
) -> None:
    """Each pod but Redis ends as a kubelet ends it, within its grace, and starts again with empty volumes."""
    async with cluster(manifests, tmp_path) as pods:
        for pod in (pod for component in pods if component != "redis" for pod in pods[component]):
            assert set(await pod.confined()) == {"65532 0000000000000000 true"}
        routers = pods["router"]
        http = [(each.address, 8000) for each in routers]
        rpc = [(each.address, 50050) for each in routers]
        port, admin_port = free_ports(2)
        backends = {(f"{RELEASE}-router", 8000): http, (f"{RELEASE}-router", 50050): rpc}
        text = config_of(manifests, backends, http, port, admin_port)
        envoy = Envoy(
            f"http://127.0.0.1:{port}", f"127.0.0.1:{port}", f"http://127.0.0.1:{admin_port}", f"{RELEASE}-router:8000"
        )
        async with run_envoy(envoy, text, port):
            callers = Callers(envoy, rpc=True)
            async with callers.at_work():
                for component in ("engine", "tokenizer", "kvstore", "router"):
                    for pod in pods[component]:
                        before, failed = sum(callers.answers.values()), len(callers.errors)
                        await pod.end()
                        await pod.start()
                        await pod.wait_ready()
                        await asyncio.sleep(5.0)
                        counted = sum(callers.answers.values()) - before
                        print(f"{pod.name}: {counted} answers, {Counter(callers.errors[failed:])}", flush=True)
        print(f"{callers.answers} answers, {len(callers.errors)} errors")
        assert callers.errors == [] and min(callers.answers.values()) > CLIENTS
