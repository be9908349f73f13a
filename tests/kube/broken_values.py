"""Values that Helm must refuse."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class BrokenValues:
    """Values, on top of those of the CPU example, that Helm must refuse with words that tell the fix."""

    name: str
    values: dict[str, Any]
    words: str


VALUES: tuple[BrokenValues, ...] = (
    BrokenValues("a misspelt value", {"router": {"replica": 3}}, "replica"),
    BrokenValues("a misspelt value of a pool", {"pools": [{"name": "a", "gpus": 1}]}, "gpus"),
    BrokenValues("a pool without a name", {"pools": [{"replicas": 1}]}, "name"),
    BrokenValues("no pools", {"pools": []}, "pools"),
    BrokenValues("a role that is not there", {"pools": [{"name": "a", "role": "encode"}]}, "role"),
    BrokenValues("a flag that the chart sets itself", {"router": {"options": {"insecure": True}}}, "insecure"),
    BrokenValues("a flag with its dashes", {"router": {"options": {"--max-n": 4}}}, "max-n"),
    BrokenValues("a digest that is a tag", {"images": {"digests": {"router": "v1"}}}, "digests"),
    BrokenValues("a drain without a delay", {"drain": {"delaySeconds": 0}}, "delaySeconds"),
    BrokenValues("two sources of Redis", {"redis": {"bundled": True, "secretName": "redis"}}, "redis"),
    BrokenValues("two pools of one name", {"pools": [{"name": "a"}, {"name": "a"}]}, "rename one"),
    BrokenValues("no model", {"model": {"path": ""}}, "set it to a folder below /models"),
    BrokenValues("a folder without a volume", {"model": {"path": "/models/m"}}, "set model.volume"),
    BrokenValues("a model of the hub without the hub", {"model": {"hub": {"enabled": False}}}, "set model.hub.enabled"),
    BrokenValues("TLS without an issuer", {"tls": {"enabled": True}}, "set tls.issuer.name"),
    BrokenValues("roles without networks", {"pools": [{"name": "a", "role": "prefill"}]}, "set podNetworks"),
    BrokenValues("ranks", {"pools": [{"name": "a", "ranks": 2}]}, "set ranks to 1"),
    BrokenValues(
        "ranks of a Deployment",
        {"pools": [{"name": "a", "ranks": 2}], "experimental": {"ranks": True}},
        "set its workload to LeaderWorkerSet",
    ),
    BrokenValues("a kvstore too far", {"pools": [{"name": "a", "kvstore": 1}]}, "the first is 0"),
    BrokenValues("Redis of nobody", {"discovery": "redis", "redis": {"bundled": False}}, "set redis.secretName"),
    BrokenValues(
        "metrics that nobody may read",
        {"monitoring": {"serviceMonitors": {"enabled": True}}},
        "set networkPolicies.monitoring",
    ),
    BrokenValues(
        "metrics of routers without a key",
        {
            "monitoring": {"serviceMonitors": {"enabled": True}},
            "networkPolicies": {"enabled": False},
            "router": {"apiKeys": {"secretName": "keys"}},
        },
        "set monitoring.serviceMonitors.routerKeySecret",
    ),
    BrokenValues("a gateway without a Gateway", {"gateway": {"enabled": True}}, "set gateway.parentRefs"),
    BrokenValues(
        "a scaled role of a DisaggregatedSet",
        {
            "podNetworks": ["10.0.0.0/8"],
            "disaggregatedSet": {"enabled": True},
            "pools": [{"name": "a", "role": "prefill", "autoscaling": {"enabled": True}}],
        },
        "KEDA cannot scale",
    ),
)
