"""Renders the chart with Helm, and finds pods, containers and flags in what came out."""

from __future__ import annotations

import functools
import json
import subprocess
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy" / "helm" / "quire"
TOOLS = ROOT / "build" / "kube"
HELM = TOOLS / "helm" / "helm"
LIMIT_S = 600
RELEASE, NAMESPACE = "quire", "llm"

# Uses that the chart is made for: each file, and two renderings that no file has.
EXAMPLES = ("cpu", "gpu", "pd", "mesh")
# All parts of the chart at once, but the DisaggregatedSet, whose roles are pools of their own here.
EVERYTHING: dict[str, Any] = {
    "model": {"path": "org/name", "hub": {"enabled": True}},
    "podNetworks": ["10.244.0.0/16"],
    "pools": [
        {"name": "prefill", "role": "prefill", "workload": "LeaderWorkerSet", "autoscaling": {"enabled": True}},
        {"name": "decode", "role": "decode", "workload": "LeaderWorkerSet", "gpu": {"count": 2}},
        {"name": "both", "autoscaling": {"enabled": True}, "options": {"worker": {"lockstep": True}}},
    ],
    "router": {"apiKeys": {"secretName": "keys"}},
    "kvstore": {"replicas": 2, "redis": {"secretName": "pages-redis"}},
    "pageMac": {"secretName": "mac"},
    "discovery": "redis",
    "redis": {"bundled": True},
    "tls": {"enabled": True, "issuer": {"name": "ca"}, "operator": True},
    "networkPolicies": {
        "monitoring": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}],
        "mesh": [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "istio-system"}}}],
    },
    "monitoring": {
        "serviceMonitors": {"enabled": True, "routerKeySecret": "metrics-key"},
        "otlpEndpoint": "https://collector.telemetry:4317",
        "otlpCaSecret": "collector-ca",
    },
    "gateway": {
        "enabled": True,
        "parentRefs": [{"name": "public", "namespace": "gateway"}],
        "hostnames": ["api.example.org"],
        "grpcHostnames": ["grpc.example.org"],
        "retries": 3,
        "backendCaConfigMap": "ca",
    },
}
# An engine of several pods. No released worker takes ranks: what is shown is that the manifest is valid.
RANKS: dict[str, Any] = {
    "model": {"path": "/models/m", "volume": {"persistentVolumeClaim": {"claimName": "models"}}},
    "pools": [{"name": "big", "workload": "LeaderWorkerSet", "ranks": 2, "gpu": {"count": 8}}],
    "experimental": {"ranks": True},
}
RENDERINGS = (*EXAMPLES, "everything", "ranks")

Manifest = dict[str, Any]


def need_tools() -> None:
    """Skip where `make kube` has not fetched Helm."""
    if not HELM.exists():
        pytest.skip("there is no Helm in build/kube: `make kube` fetches it")


def helm(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Helm, and return its result, also of a failure."""
    need_tools()
    return subprocess.run([HELM, *arguments], capture_output=True, text=True, timeout=LIMIT_S, check=False)


def template(*files: Path, values: Mapping[str, Any] | None = None) -> subprocess.CompletedProcess[str]:
    """Run `helm template` with these files of values, and then with these values."""
    with tempfile.TemporaryDirectory() as folder:
        given = [*files]
        if values is not None:
            given.append(Path(folder) / "values.json")
            given[-1].write_text(json.dumps(values))
        flags = [f"--values={file}" for file in given]
        return helm("template", RELEASE, str(CHART), f"--namespace={NAMESPACE}", *flags)


def render(*files: Path, values: Mapping[str, Any] | None = None) -> list[Manifest]:
    """Return the manifests that Helm renders. Fails the test if it does not."""
    result = template(*files, values=values)
    assert result.returncode == 0, result.stderr
    return [document for document in yaml.safe_load_all(result.stdout) if document]


@functools.cache
def _rendered(name: str) -> str:
    values = {"everything": EVERYTHING, "ranks": RANKS}.get(name)
    return json.dumps(render(*([] if values else [CHART / f"values-{name}.yaml"]), values=values))


def rendered(name: str) -> list[Manifest]:
    """Return a copy of one of RENDERINGS."""
    return list(json.loads(_rendered(name)))


def title(manifest: Manifest) -> str:
    """Return the kind and name."""
    return f"{manifest.get('kind')}/{manifest.get('metadata', {}).get('name')}"


def one(manifests: Sequence[Manifest], kind: str, name: str) -> Manifest:
    """Return the manifest of this kind whose name is the release's with `-name`, or the release's if that is empty."""
    wanted = f"{kind}/{RELEASE}" + (f"-{name}" if name else "")
    return next(each for each in manifests if title(each) == wanted)


def of_kind(manifests: Sequence[Manifest], *kinds: str) -> list[Manifest]:
    """Return the manifests of these kinds."""
    return [each for each in manifests if each.get("kind") in kinds]


@dataclass(frozen=True)
class Pods:
    """Equal pods of a workload: `owner` is its title."""

    owner: str
    workload: Manifest
    template: dict[str, Any]

    @property
    def labels(self) -> dict[str, str]:
        """The labels of the pods."""
        return dict(self.template["metadata"]["labels"])

    @property
    def component(self) -> str:
        """The chart's name for these pods."""
        return self.labels.get("app.kubernetes.io/component", "")

    @property
    def spec(self) -> dict[str, Any]:
        """The pods' spec."""
        return dict(self.template["spec"])

    @property
    def containers(self) -> list[dict[str, Any]]:
        """The pods' containers."""
        return list(self.spec["containers"])

    @property
    def ports(self) -> dict[str, int]:
        """All ports of the pod, by name."""
        return {port["name"]: port["containerPort"] for each in self.containers for port in each.get("ports", [])}


def _leader_worker_pods(owner: str, workload: Manifest, spec: Mapping[str, Any]) -> Iterator[Pods]:
    templates = spec["leaderWorkerTemplate"]
    for name in ("leaderTemplate", "workerTemplate"):
        if name in templates:
            yield Pods(owner, workload, templates[name])


def pods_of(manifests: Sequence[Manifest]) -> list[Pods]:
    """Return the pods of all workloads."""
    found: list[Pods] = []
    for each in manifests:
        if each.get("kind") in ("Deployment", "StatefulSet"):
            found.append(Pods(title(each), each, each["spec"]["template"]))
        elif each.get("kind") == "LeaderWorkerSet":
            found += _leader_worker_pods(title(each), each, each["spec"])
        elif each.get("kind") == "DisaggregatedSet":
            for role in each["spec"]["roles"]:
                found += _leader_worker_pods(f"{title(each)}/{role['name']}", each, role["spec"])
    return found


def flags_of(container: Mapping[str, Any]) -> dict[str, str]:
    """Return the container's flags by name; a switch is `true`, or `false` if it begins with `no-`."""
    found = {}
    for argument in container.get("args", []):
        name, _, value = str(argument).removeprefix("--").partition("=")
        found[name.removeprefix("no-")] = value or ("false" if name.startswith("no-") else "true")
    return found
