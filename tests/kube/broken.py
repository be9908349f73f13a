"""Releases that are broken on purpose, each with what must catch it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.kube.chart import Manifest, one

Manifests = list[Manifest]
# The check that catches a release: a schema of Kubernetes or of a custom resource, or the rule of this name.
SCHEMA = "schema"


@dataclass(frozen=True)
class BrokenManifest:
    """A change of a rendering. `by` is SCHEMA or the name of a rule."""

    name: str
    by: str
    change: Callable[[Manifests], object]
    base: str = "everything"


def _spec(manifests: Manifests, kind: str, name: str) -> Any:
    return one(manifests, kind, name)["spec"]


def _pod(manifests: Manifests, kind: str, name: str) -> Any:
    return _spec(manifests, kind, name)["template"]["spec"]


def _engine(manifests: Manifests) -> Any:
    """The spec of the pods of a pool that is a Deployment."""
    return _pod(manifests, "Deployment", "engine-both")


def _container(pod: Any, name: str) -> Any:
    return next(each for each in pod["containers"] if each["name"] == name)


def _flag(container: Any, name: str, value: str | None) -> None:
    """Replace a flag; None removes it."""
    container["args"] = [each for each in container["args"] if each.removeprefix("--").partition("=")[0] != name]
    if value is not None:
        container["args"].append(f"--{name}={value}" if value else f"--{name}")


def _show_certificate(container: Any, identity: str) -> None:
    for part, file in (("cert", "crt"), ("key", "key")):
        _flag(container, f"tls-{part}", f"/tls/{identity}/tls.{file}")
    container["volumeMounts"].append({"name": f"tls-{identity}", "mountPath": f"/tls/{identity}"})


def _pool_set(manifests: Manifests, name: str) -> Any:
    """The pods' template of a pool that is a LeaderWorkerSet."""
    return _spec(manifests, "LeaderWorkerSet", f"engine-{name}")["leaderWorkerTemplate"]


def _set(target: Any, **values: Any) -> None:
    target.update(values)


def _drop(manifests: Manifests, kind: str, name: str) -> None:
    manifests.remove(one(manifests, kind, name))


MANIFESTS: tuple[BrokenManifest, ...] = (
    BrokenManifest(
        "an unknown field of a Deployment", SCHEMA, lambda m: _set(_spec(m, "Deployment", "router"), replica=3)
    ),
    BrokenManifest("replicas as text", SCHEMA, lambda m: _set(_spec(m, "Deployment", "router"), replicas="three")),
    BrokenManifest(
        "a port without its number", SCHEMA, lambda m: _spec(m, "Service", "router")["ports"][0].pop("port")
    ),
    BrokenManifest(
        "a probe with a field of another probe",
        SCHEMA,
        lambda m: _set(_container(_engine(m), "worker")["livenessProbe"]["httpGet"], service="liveness"),
    ),
    BrokenManifest(
        "a policy with the field of another kind",
        SCHEMA,
        lambda m: _set(_spec(m, "NetworkPolicy", "router"), selector={}),
    ),
    BrokenManifest(
        "a version of the API that is gone",
        SCHEMA,
        lambda m: _set(one(m, "PodDisruptionBudget", "router"), apiVersion="policy/v1beta1"),
    ),
    BrokenManifest(
        "a certificate without its issuer", SCHEMA, lambda m: _spec(m, "Certificate", "worker").pop("issuerRef")
    ),
    BrokenManifest(
        "a certificate with an unknown usage",
        SCHEMA,
        lambda m: _set(_spec(m, "Certificate", "worker"), usages=["serverAuth"]),
    ),
    BrokenManifest(
        "a monitor with an unknown field",
        SCHEMA,
        lambda m: _set(_spec(m, "ServiceMonitor", "engine")["endpoints"][0], serverName="x"),
    ),
    BrokenManifest(
        "a scaler without triggers", SCHEMA, lambda m: _spec(m, "ScaledObject", "engine-both").pop("triggers")
    ),
    BrokenManifest(
        "a scaler with a misspelt field", SCHEMA, lambda m: _set(_spec(m, "ScaledObject", "engine-both"), maxReplicas=3)
    ),
    BrokenManifest(
        "a route with an unknown kind of match",
        SCHEMA,
        lambda m: _spec(m, "HTTPRoute", "")["rules"][0]["matches"][0]["path"].update(type="Prefix"),
    ),
    BrokenManifest(
        "a GRPCRoute with the matches of an HTTPRoute",
        SCHEMA,
        lambda m: _spec(m, "GRPCRoute", "")["rules"][0].update(matches=[{"path": {"value": "/"}}]),
    ),
    BrokenManifest(
        "a LeaderWorkerSet without a template", SCHEMA, lambda m: _pool_set(m, "decode").pop("workerTemplate")
    ),
    BrokenManifest(
        "a LeaderWorkerSet with an unknown policy",
        SCHEMA,
        lambda m: _pool_set(m, "decode").update(restartPolicy="Never"),
    ),
    BrokenManifest(
        "a DisaggregatedSet of one role", SCHEMA, lambda m: _spec(m, "DisaggregatedSet", "engine")["roles"].pop(), "pd"
    ),
    BrokenManifest(
        "a DisaggregatedSet with a misspelt role",
        SCHEMA,
        lambda m: _spec(m, "DisaggregatedSet", "engine")["roles"][0].update(replica=2),
        "pd",
    ),
    BrokenManifest("two services of one name", "names_are_unique", lambda m: m.append(one(m, "Service", "router"))),
    BrokenManifest(
        "a worker that runs as root", "pods_are_restricted", lambda m: _engine(m)["securityContext"].update(runAsUser=0)
    ),
    BrokenManifest(
        "a writable root",
        "pods_are_restricted",
        lambda m: _container(_engine(m), "worker")["securityContext"].pop("readOnlyRootFilesystem"),
    ),
    BrokenManifest(
        "a capability for a GPU worker",
        "pods_are_restricted",
        lambda m: _set(
            _pool_set(m, "decode")["workerTemplate"]["spec"]["containers"][1]["securityContext"],
            capabilities={"drop": ["ALL"], "add": ["SYS_ADMIN"]},
        ),
    ),
    BrokenManifest(
        "a token of the API server",
        "pods_are_restricted",
        lambda m: _pod(m, "Deployment", "tokenizer").pop("automountServiceAccountToken"),
    ),
    BrokenManifest(
        "variables of service links",
        "service_links_are_off",
        lambda m: _pod(m, "Deployment", "router").pop("enableServiceLinks"),
    ),
    BrokenManifest(
        "a flag that no service has",
        "flags_are_accepted",
        lambda m: _flag(_container(_engine(m), "worker"), "tensor-parallel-size", "2"),
    ),
    BrokenManifest(
        "a value beyond a flag's bound",
        "flags_are_accepted",
        lambda m: _flag(_container(_engine(m), "worker"), "gpu-memory-utilization", "92"),
    ),
    BrokenManifest(
        "plain text to other hosts",
        "flags_are_accepted",
        lambda m: _flag(_container(_pod(m, "Deployment", "tokenizer"), "tokenizer"), "insecure", None),
        "mesh",
    ),
    BrokenManifest(
        "plain HTTP to clients under TLS",
        "flags_are_accepted",
        lambda m: _flag(_container(_pod(m, "Deployment", "router"), "router"), "ssl-certfile", None),
    ),
    BrokenManifest(
        "two sources of one secret",
        "flags_are_accepted",
        lambda m: _flag(_container(_pod(m, "StatefulSet", "kvstore"), "kvstore"), "redis-url", "redis://r:6379/1"),
    ),
    BrokenManifest(
        "the newest image, whatever it is",
        "images_are_named",
        lambda m: _container(_engine(m), "worker").update(image="quire/worker-cpu:latest"),
    ),
    BrokenManifest(
        "a CPU image for GPUs",
        "images_are_named",
        lambda m: _pool_set(m, "decode")["workerTemplate"]["spec"]["containers"][1].update(image="quire/worker-cpu:1"),
    ),
    BrokenManifest(
        "a kvstore whose pages fill its memory",
        "memory_is_bounded",
        lambda m: _container(_pod(m, "StatefulSet", "kvstore"), "kvstore")["resources"]["limits"].update(memory="1Gi"),
    ),
    BrokenManifest(
        "a liveness probe that asks for readiness",
        "probes_ask_the_service",
        lambda m: _container(_engine(m), "scheduler")["livenessProbe"]["httpGet"].update(path="/readyz"),
    ),
    BrokenManifest(
        "a probe in plain text of a TLS port",
        "probes_ask_the_service",
        lambda m: _container(_engine(m), "worker")["readinessProbe"]["httpGet"].update(scheme="HTTP"),
    ),
    BrokenManifest(
        "a grace that cuts the drain off",
        "grace_covers_the_drain",
        lambda m: _pod(m, "Deployment", "router").update(terminationGracePeriodSeconds=30),
    ),
    BrokenManifest(
        "a longer drain with the same grace",
        "grace_covers_the_drain",
        lambda m: _flag(_container(_engine(m), "scheduler"), "drain-timeout-s", "120"),
    ),
    BrokenManifest(
        "a worker that ends before its scheduler",
        "grace_covers_the_drain",
        lambda m: _container(_engine(m), "worker").pop("lifecycle"),
    ),
    BrokenManifest(
        "a Deployment that does not select its pods",
        "selectors_fit",
        lambda m: _spec(m, "Deployment", "router")["template"]["metadata"]["labels"].update(
            {"app.kubernetes.io/component": "edge"}
        ),
    ),
    BrokenManifest(
        "a selector with the chart's version",
        "selectors_fit",
        lambda m: [
            _spec(m, "Deployment", "router")["selector"]["matchLabels"].update({"helm.sh/chart": "quire-1"}),
            _spec(m, "Deployment", "router")["template"]["metadata"]["labels"].update({"helm.sh/chart": "quire-1"}),
        ],
    ),
    BrokenManifest(
        "a service whose target has another name",
        "services_reach_pods",
        lambda m: _spec(m, "Service", "tokenizer")["ports"][0].update(targetPort="rpc"),
    ),
    BrokenManifest(
        "one address for all schedulers",
        "services_reach_pods",
        lambda m: _spec(m, "Service", "scheduler").pop("clusterIP"),
    ),
    BrokenManifest(
        "a scheduler that leaves DNS before it has drained",
        "services_reach_pods",
        lambda m: _spec(m, "Service", "scheduler").pop("publishNotReadyAddresses"),
    ),
    BrokenManifest(
        "a gRPC port that a mesh takes for HTTP/1.1",
        "services_reach_pods",
        lambda m: _spec(m, "Service", "tokenizer")["ports"][0].pop("appProtocol"),
        "mesh",
    ),
    BrokenManifest(
        "schedulers at another port",
        "addresses_exist",
        lambda m: _flag(
            _container(_pod(m, "Deployment", "router"), "router"), "schedulers", "quire-scheduler.llm.svc:50053"
        ),
        "mesh",
    ),
    BrokenManifest(
        "a kvstore that no replica is",
        "addresses_exist",
        lambda m: _flag(_container(_engine(m), "worker"), "kvstore", "quire-kvstore-2.quire-kvstore.llm.svc:50054"),
    ),
    BrokenManifest(
        "a secret that is not mounted",
        "files_are_mounted",
        lambda m: _container(_pod(m, "Deployment", "router"), "router")["volumeMounts"].pop(),
    ),
    BrokenManifest(
        "a worker with the scheduler's certificate",
        "identities_are_certified",
        lambda m: _show_certificate(_container(_engine(m), "worker"), "scheduler"),
    ),
    BrokenManifest(
        "a certificate of another trust domain",
        "identities_are_certified",
        lambda m: _spec(m, "Certificate", "worker").update(uris=["spiffe://cluster.local/ns/llm/sa/worker"]),
    ),
    BrokenManifest(
        "a budget that lets no node drain",
        "budgets_cover_pods",
        lambda m: _spec(m, "PodDisruptionBudget", "kvstore").update(maxUnavailable=0),
    ),
    BrokenManifest(
        "a pool without a budget", "budgets_cover_pods", lambda m: _drop(m, "PodDisruptionBudget", "engine-both")
    ),
    BrokenManifest(
        "no policy that denies first", "everything_is_denied_first", lambda m: _drop(m, "NetworkPolicy", "deny")
    ),
    BrokenManifest(
        "a worker that other pods reach",
        "workers_are_private",
        lambda m: _flag(_container(_engine(m), "worker"), "listen", "0.0.0.0:50053"),
    ),
    BrokenManifest(
        "a disk that is smaller than its pages",
        "disks_have_room",
        lambda m: _spec(m, "StatefulSet", "kvstore")["volumeClaimTemplates"][0]["spec"]["resources"]["requests"].update(
            storage="8Gi"
        ),
    ),
    BrokenManifest(
        "replicas beside a scaler",
        "scaling_follows_the_oldest_wait",
        lambda m: _spec(m, "Deployment", "engine-both").update(replicas=2),
    ),
    BrokenManifest(
        "a scaler of another pool's waits",
        "scaling_follows_the_oldest_wait",
        lambda m: _spec(m, "ScaledObject", "engine-both")["triggers"][0]["metadata"].update(
            query='max(quire_scheduler_oldest_wait_seconds{quire_pool="decode"})'
        ),
    ),
    BrokenManifest(
        "a scaler of nothing",
        "scaling_follows_the_oldest_wait",
        lambda m: _spec(m, "ScaledObject", "engine-both")["scaleTargetRef"].update(name="engine"),
    ),
    BrokenManifest(
        "a monitor of a port that is not there",
        "monitors_find_ports",
        lambda m: _spec(m, "ServiceMonitor", "engine")["endpoints"][0].update(port="prometheus"),
    ),
    BrokenManifest(
        "a route to the metrics",
        "routes_lead_to_routers",
        lambda m: _spec(m, "HTTPRoute", "")["rules"][0]["backendRefs"][0].update(
            name="quire-router-metrics", port=9090
        ),
    ),
    BrokenManifest(
        "a route that cuts long answers off",
        "routes_lead_to_routers",
        lambda m: _spec(m, "HTTPRoute", "")["rules"][0].update(timeouts={"request": "15s"}),
    ),
    BrokenManifest(
        "two routes of one hostname",
        "routes_lead_to_routers",
        lambda m: _spec(m, "GRPCRoute", "").update(hostnames=["api.example.org"]),
    ),
    BrokenManifest("an account that is not there", "accounts_exist", lambda m: _drop(m, "ServiceAccount", "engine")),
    BrokenManifest(
        "prefill without decode", "roles_of_a_set_are_complete", lambda m: _drop(m, "LeaderWorkerSet", "engine-decode")
    ),
)
