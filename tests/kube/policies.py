"""The calls between pods that the rendered NetworkPolicies allow, as a network plug-in applies them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tests.kube.chart import Manifest, of_kind, pods_of

Edge = tuple[str, str, int]
# Ports that programs outside of the chart listen on.
OUTSIDE_PORTS = {
    "dns": (53,),
    "redis": (6379,),
    "pages-redis": (6379,),
    "hub": (443,),
    "collector": (4317,),
    "mesh": (15012,),
}
STRANGER = "stranger"
# Namespaces of programs outside of the chart.
OUTSIDE = {
    "clients": "gateway",
    "monitoring": "monitoring",
    "dns": "kube-system",
    "redis": "databases",
    "hub": "",
    "collector": "telemetry",
    "mesh": "istio-system",
    STRANGER: "other",
}


def selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Whether a label selector matches. Expressions do not occur in the chart: they match nothing."""
    if selector.get("matchExpressions"):
        return False
    return all(labels.get(key) == value for key, value in (selector.get("matchLabels") or {}).items())


def components(manifests: Sequence[Manifest]) -> dict[str, tuple[dict[str, str], set[int]]]:
    """Return the labels and the ports of the chart's pods, by component."""
    found: dict[str, tuple[dict[str, str], set[int]]] = {}
    for pods in pods_of(manifests):
        _, ports = found.setdefault(pods.component, (pods.labels, set()))
        ports.update(pods.ports.values())
    return found


def _allows(
    rules: Sequence[Mapping[str, Any]] | None, word: str, end: str, labels: Mapping[str, str] | None, port: int
) -> bool:
    """Whether a rule of one direction allows the port of the other end, which is a pod of the chart (with labels) or a
    program in a namespace of OUTSIDE."""
    for rule in rules or ():
        ports = [each["port"] for each in rule.get("ports", []) if each.get("protocol", "TCP") == "TCP"]
        if rule.get("ports") and port not in ports:
            continue
        if not rule.get(word) or any(_is_peer(peer, end, labels) for peer in rule[word]):
            return True
    return False


def _is_peer(peer: Mapping[str, Any], end: str, labels: Mapping[str, str] | None) -> bool:
    if "namespaceSelector" in peer:
        return selects(peer["namespaceSelector"], {"kubernetes.io/metadata.name": OUTSIDE.get(end, "")})
    return labels is not None and selects(peer.get("podSelector", {}), labels)


def _permitted(
    policies: Sequence[Manifest],
    own: Mapping[str, str],
    direction: str,
    end: str,
    labels: Mapping[str, str] | None,
    port: int,
) -> bool:
    """Whether the policies of a pod permit a connection: all do if none selects the pod."""
    word = {"Ingress": "from", "Egress": "to"}[direction]
    applying = [
        each["spec"]
        for each in policies
        if selects(each["spec"]["podSelector"], own) and direction in each["spec"].get("policyTypes", [])
    ]
    return not applying or any(_allows(spec.get(direction.lower()), word, end, labels, port) for spec in applying)


def allowed_edges(manifests: Sequence[Manifest]) -> set[Edge]:
    """Return all connections that the policies allow: from, to and port."""
    return set(_edges(manifests))


def _edges(manifests: Sequence[Manifest]) -> Iterator[Edge]:
    policies = of_kind(manifests, "NetworkPolicy")
    inside = components(manifests)
    for source, (labels, _) in inside.items():
        for target, (others, ports) in inside.items():
            for port in sorted(ports):
                if _permitted(policies, labels, "Egress", target, others, port) and _permitted(
                    policies, others, "Ingress", source, labels, port
                ):
                    yield source, target, port
        for target, port in itertools.chain.from_iterable(
            ((name, port) for port in OUTSIDE_PORTS[name])
            for name in OUTSIDE
            if name in OUTSIDE_PORTS and name not in inside
        ):
            if _permitted(policies, labels, "Egress", target, None, port):
                yield source, target, port
    for target, (others, ports) in inside.items():
        for port in sorted(ports):
            callers = {
                source
                for source in OUTSIDE
                if source not in inside and _permitted(policies, others, "Ingress", source, None, port)
            }
            # Whoever calls although no policy names it stands for everybody.
            for source in {"clients"} if STRANGER in callers and target == "router" else callers:
                yield source, target, port
