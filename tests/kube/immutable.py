"""The fields of a release's objects that Kubernetes refuses to change."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tests.kube.chart import Manifest, title

# All fields of a StatefulSet's spec but these are immutable.
STATEFUL_SET_MUTABLE = {
    "minReadySeconds",
    "ordinals",
    "persistentVolumeClaimRetentionPolicy",
    "replicas",
    "revisionHistoryLimit",
    "template",
    "updateStrategy",
}


def immutable(manifest: Manifest) -> dict[str, Any]:
    """Return the fields that an existing object keeps for its life."""
    spec = manifest.get("spec", {})
    kind = manifest["kind"]
    if kind == "Deployment":
        return {"selector": spec["selector"]}
    if kind == "StatefulSet":
        return {key: value for key, value in spec.items() if key not in STATEFUL_SET_MUTABLE}
    if kind == "Service":
        return {"clusterIP": spec.get("clusterIP", "given")}
    if kind == "PodDisruptionBudget":
        return {"selector": spec["selector"]}
    if kind == "LeaderWorkerSet":
        return {"subGroupPolicy": spec["leaderWorkerTemplate"].get("subGroupPolicy")}
    return {}


def frozen(manifests: Sequence[Manifest]) -> dict[str, dict[str, Any]]:
    """Return the immutable fields of all objects, by kind and name."""
    return {title(each): immutable(each) for each in manifests}


def changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return the objects of both that differ."""
    return [name for name in old if name in new and old[name] != new[name]]
