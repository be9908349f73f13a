"""Rules that no schema has: the manifests of a release fit each other, the services, and what the guides promise."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from quire_common.identity.callers import IDENTITIES, identity_uri, server_name
from tests.kube.chart import Manifest, Pods, flags_of, of_kind, pods_of, title
from tests.kube.flags import SERVICES, problems_of
from tests.kube.policies import components, selects

Problems = Iterator[str]
# Seconds of the last part of a stop: gRPC's grace, closing, and the kubelet.
LEAST_MARGIN_S = 5
_UNITS = {"": 1, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "M": 10**6, "G": 10**9}
_METRIC = re.compile(r"quire_\w+?(?=\{)")


def amount(text: str | int) -> int:
    """Return the bytes of a quantity such as 8Gi."""
    number, unit = re.fullmatch(r"(\d+)(\w*)", str(text)).groups()  # type: ignore[union-attr]  # the schema has this form
    return int(number) * _UNITS[unit]


def _services(pods: Pods) -> list[dict[str, Any]]:
    return [each for each in pods.containers if each["name"] in SERVICES]


def names_are_unique(manifests: Sequence[Manifest]) -> Problems:
    for name, count in Counter((each.get("apiVersion"), title(each)) for each in manifests).items():
        if count > 1:
            yield f"{name[1]}: there are {count}"


def pods_are_restricted(manifests: Sequence[Manifest]) -> Problems:
    """The profile `restricted` of Kubernetes' pod security, and a read-only root."""
    for pods in pods_of(manifests):
        context = pods.spec.get("securityContext", {})
        if context.get("runAsNonRoot") is not True or context.get("runAsUser") != 65532:
            yield f"{pods.owner}: does not run as 65532"
        if context.get("seccompProfile", {}).get("type") != "RuntimeDefault":
            yield f"{pods.owner}: has no seccomp profile"
        if pods.spec.get("automountServiceAccountToken") is not False:
            yield f"{pods.owner}: gets a token of the API server"
        if any(pods.spec.get(name) for name in ("hostNetwork", "hostPID", "hostIPC")):
            yield f"{pods.owner}: shares a namespace of its host"
        if any("hostPath" in volume for volume in pods.spec.get("volumes", [])):
            yield f"{pods.owner}: reads files of its host"
        for container in [*pods.containers, *pods.spec.get("initContainers", [])]:
            inner = container.get("securityContext", {})
            if inner.get("readOnlyRootFilesystem") is not True:
                yield f"{pods.owner}: {container['name']} may write to its image"
            if inner.get("allowPrivilegeEscalation") is not False or inner.get("privileged"):
                yield f"{pods.owner}: {container['name']} may gain privileges"
            if inner.get("capabilities") != {"drop": ["ALL"]}:
                yield f"{pods.owner}: {container['name']} keeps capabilities"


def service_links_are_off(manifests: Sequence[Manifest]) -> Problems:
    """A link's variable QUIRE_ROUTER_PORT would be an unknown option, with which no service starts."""
    for pods in pods_of(manifests):
        if pods.spec.get("enableServiceLinks") is not False:
            yield f"{pods.owner}: service links are on"


def flags_are_accepted(manifests: Sequence[Manifest]) -> Problems:
    for pods in pods_of(manifests):
        for container in _services(pods):
            for problem in problems_of(container):
                yield f"{pods.owner}: {problem}"


def images_are_named(manifests: Sequence[Manifest]) -> Problems:
    for pods in pods_of(manifests):
        for container in pods.containers:
            image = str(container["image"])
            name = image.rpartition("/")[2]
            if not re.search(r":[\w.-]+$|@sha256:[0-9a-f]{64}$", name) or name.endswith(":latest"):
                yield f"{pods.owner}: the image {image} has no version"
            kind = container["name"]
            gpu = any("gpu" in key for key in container.get("resources", {}).get("limits", {}))
            wanted = kind if kind != "worker" else "worker-gpu" if gpu else "worker-cpu"
            if kind in SERVICES and re.split("[:@]", name)[0] != wanted:
                yield f"{pods.owner}: {kind} has the image {image}"
            if kind == "worker" and (flags_of(container).get("device") == "cuda") != gpu:
                yield f"{pods.owner}: the worker's device does not fit its GPUs"


def memory_is_bounded(manifests: Sequence[Manifest]) -> Problems:
    for pods in pods_of(manifests):
        for container in pods.containers:
            resources = container.get("resources", {})
            if "memory" not in resources.get("limits", {}) or "cpu" not in resources.get("requests", {}):
                yield f"{pods.owner}: {container['name']} has no bound of memory or asks for no CPU"
            elif amount(resources["limits"]["memory"]) <= int(flags_of(container).get("ram-bytes", 0)):
                yield f"{pods.owner}: the kvstore's pages alone fill its memory"


def probes_ask_the_service(manifests: Sequence[Manifest]) -> Problems:
    """Liveness never asks for readiness: a worker that loads its model would be killed."""
    wanted = {"startupProbe": "/livez", "livenessProbe": "/livez", "readinessProbe": "/readyz"}
    for pods in pods_of(manifests):
        for container in _services(pods):
            flags = flags_of(container)
            metrics = int(flags["metrics-listen"].rpartition(":")[2]) if "metrics-listen" in flags else 0
            port = int(flags["port"]) if container["name"] == "router" else metrics
            scheme = "HTTPS" if "tls-cert" in flags else "HTTP"
            for probe, path in wanted.items():
                asked = container.get(probe, {}).get("httpGet", {})
                if (asked.get("path"), asked.get("port"), asked.get("scheme", "HTTP")) != (path, port, scheme):
                    name = container["name"]
                    yield f"{pods.owner}: the {probe} of {name} does not ask {path} of port {port} by {scheme}"


def grace_covers_the_drain(manifests: Sequence[Manifest]) -> Problems:
    for pods in pods_of(manifests):
        grace = pods.spec.get("terminationGracePeriodSeconds", 30)
        delays = set()
        for container in _services(pods):
            flags = flags_of(container)
            asleep = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
            delay = asleep + float(flags.get("drain-delay-s", 0))
            delays.add(delay)
            needed = delay + float(flags.get("drain-timeout-s", 30)) + LEAST_MARGIN_S
            if grace < needed:
                yield f"{pods.owner}: {container['name']} needs {needed:.0f} s to end, and has {grace}"
            if delay <= 0:
                yield f"{pods.owner}: {container['name']} ends before its callers notice"
        if len(delays) > 1:
            yield f"{pods.owner}: a worker does not drain when its scheduler does"


def selectors_fit(manifests: Sequence[Manifest]) -> Problems:
    seen: dict[str, str] = {}
    for pods in pods_of(manifests):
        selector = pods.workload["spec"].get("selector", {})
        if pods.workload["kind"] in ("Deployment", "StatefulSet"):
            if not selects(selector, pods.labels):
                yield f"{pods.owner}: does not select its own pods"
            others = [
                other.owner
                for other in pods_of(manifests)
                if other.owner != pods.owner and selects(selector, other.labels)
            ]
            if others:
                yield f"{pods.owner}: selects the pods of {others[0]} too"
            if any(
                label in selector.get("matchLabels", {}) for label in ("helm.sh/chart", "app.kubernetes.io/version")
            ):
                yield f"{pods.owner}: its selector has a version, which cannot change"
            seen[json.dumps(selector, sort_keys=True)] = pods.owner


def services_reach_pods(manifests: Sequence[Manifest]) -> Problems:
    for service in of_kind(manifests, "Service"):
        matched = [
            pods for pods in pods_of(manifests) if selects({"matchLabels": service["spec"]["selector"]}, pods.labels)
        ]
        if not matched:
            yield f"{title(service)}: selects no pods"
        for port in service["spec"]["ports"]:
            target = port.get("targetPort", port["port"])
            for pods in matched:
                if target not in pods.ports or pods.ports[target] != port["port"]:
                    yield f"{title(service)}: {pods.owner} has no port {target} with the number {port['port']}"
            protocol = port.get("appProtocol", "")
            secured = any("tls-cert" in flags_of(each) for pods in matched for each in pods.containers)
            if port["name"] == "grpc" and protocol != ("https" if secured else "kubernetes.io/h2c"):
                yield f"{title(service)}: a mesh does not know that port {port['port']} is gRPC"
        internal = any(pods.component in ("tokenizer", "engine", "kvstore") for pods in matched)
        if internal and service["spec"].get("clusterIP") != "None":
            yield f"{title(service)}: one address hides its pods, of which callers choose"
        if internal and not service["spec"].get("publishNotReadyAddresses"):
            yield f"{title(service)}: requests of a pod that leaves would be cut off"


def addresses_exist(manifests: Sequence[Manifest]) -> Problems:
    """Each name that a flag has is a service of the release, or a pod of one, with this port."""
    services = {
        each["metadata"]["name"]: [port["port"] for port in each["spec"]["ports"]]
        for each in of_kind(manifests, "Service")
    }
    sets = {each["metadata"]["name"]: each["spec"] for each in of_kind(manifests, "StatefulSet")}
    for pods in pods_of(manifests):
        own = {flags_of(each).get("listen", "").rpartition(":")[2] for each in pods.containers}
        for container in _services(pods):
            flags = flags_of(container)
            for flag in ("schedulers", "tokenizers", "kvstores", "kvstore", "worker"):
                if flag not in flags:
                    continue
                host, _, port = flags[flag].partition(":")
                if host == "127.0.0.1" and port in own:
                    continue
                first, *rest = host.split(".")
                name, ordinal = (
                    (rest[0], first.rpartition("-")[2])
                    if rest and rest[0] in services and first not in services
                    else (first, "")
                )
                if int(port) not in services.get(name, ()):
                    yield f"{pods.owner}: --{flag} names {flags[flag]}, which is no service"
                elif ordinal and int(ordinal) >= sets[name]["replicas"]:
                    yield f"{pods.owner}: --{flag} names {flags[flag]}, which is no pod"


def files_are_mounted(manifests: Sequence[Manifest]) -> Problems:
    for pods in pods_of(manifests):
        volumes = {each["name"]: each for each in pods.spec.get("volumes", [])}
        claims = {each["metadata"]["name"] for each in pods.workload["spec"].get("volumeClaimTemplates", [])}
        used: set[str] = set()
        for container in pods.containers:
            mounts = {each["mountPath"]: each for each in container.get("volumeMounts", [])}
            used.update(each["name"] for each in mounts.values())
            for missing in {each["name"] for each in mounts.values()} - set(volumes) - claims:
                yield f"{pods.owner}: {container['name']} mounts {missing}, which is no volume"
            for name, value in flags_of(container).items():
                if (
                    value.startswith("/")
                    and name != "served-model-name"
                    and not any(value.startswith(f"{path}/") for path in mounts)
                ):
                    yield f"{pods.owner}: --{name} is {value}, where nothing is mounted"
                if name == "disk-path" and not any(
                    value.startswith(f"{path}/") and not each.get("readOnly") for path, each in mounts.items()
                ):
                    yield f"{pods.owner}: --{name} is {value}, where nothing may be written"
        for name in set(volumes) - used:
            yield f"{pods.owner}: the volume {name} is mounted nowhere"


def identities_are_certified(manifests: Sequence[Manifest]) -> Problems:
    """The certificate of each mounted secret names the service that shows it, and nobody else."""
    certificates = {each["spec"]["secretName"]: each["spec"] for each in of_kind(manifests, "Certificate")}
    for secret, spec in certificates.items():
        for uri in spec.get("uris", []):
            identity = uri.rpartition("/")[2]
            if (
                identity not in IDENTITIES
                or uri != identity_uri(identity)
                or spec["dnsNames"] != [server_name(identity)]
            ):
                yield f"Certificate/{secret}: {uri} with {spec['dnsNames']} is no identity"
            if not {"server auth", "client auth"} <= set(spec.get("usages", [])):
                yield f"Certificate/{secret}: may not be shown by servers and clients"
    for pods in pods_of(manifests):
        secrets = {
            each["name"]: each["secret"]["secretName"] for each in pods.spec.get("volumes", []) if "secret" in each
        }
        for container in _services(pods):
            path = flags_of(container).get("tls-cert")
            if path is None:
                continue
            names = [
                secrets.get(each["name"], "")
                for each in container["volumeMounts"]
                if path.startswith(f"{each['mountPath']}/")
            ]
            uris = [uri for name in names for uri in certificates.get(name, {}).get("uris", [])]
            if uris != [identity_uri(container["name"])]:
                yield f"{pods.owner}: {container['name']} shows the certificate of {uris}"


def budgets_cover_pods(manifests: Sequence[Manifest]) -> Problems:
    budgets = of_kind(manifests, "PodDisruptionBudget")
    for pods in pods_of(manifests):
        if pods.component in ("redis", "engine-rank"):
            continue
        covering = [each for each in budgets if selects(each["spec"]["selector"], pods.labels)]
        if len(covering) != 1:
            yield f"{pods.owner}: has {len(covering)} budgets, and evictions need exactly one"
        elif covering[0]["spec"].get("maxUnavailable") != 1:
            yield f"{title(covering[0])}: lets no node drain, or too many pods go at once"
    for budget in budgets:
        if not any(selects(budget["spec"]["selector"], pods.labels) for pods in pods_of(manifests)):
            yield f"{title(budget)}: selects no pods"


def everything_is_denied_first(manifests: Sequence[Manifest]) -> Problems:
    policies = [each["spec"] for each in of_kind(manifests, "NetworkPolicy")]
    bare = [each for each in policies if not each.get("ingress") and not each.get("egress")]
    for name, (labels, _) in components(manifests).items():
        if not any(
            selects(each["podSelector"], labels) and set(each["policyTypes"]) == {"Ingress", "Egress"} for each in bare
        ):
            yield f"NetworkPolicy: nothing denies {name} what no other policy allows"


def workers_are_private(manifests: Sequence[Manifest]) -> Problems:
    """Only its own scheduler calls a worker."""
    for pods in pods_of(manifests):
        for container in pods.containers:
            if container["name"] == "worker" and not flags_of(container).get("listen", "").startswith("127.0.0.1:"):
                yield f"{pods.owner}: other pods reach the worker"


def disks_have_room(manifests: Sequence[Manifest]) -> Problems:
    for pods in pods_of(manifests):
        for container in pods.containers:
            flags = flags_of(container)
            if "disk-bytes" not in flags:
                continue
            claims = [
                each["spec"]["resources"]["requests"]["storage"]
                for each in pods.workload["spec"].get("volumeClaimTemplates", [])
            ]
            sizes = [each["emptyDir"]["sizeLimit"] for each in pods.spec["volumes"] if each["name"] == "pages"]
            needed = int(flags["disk-bytes"]) + int(flags["disk-keep-free-bytes"])
            if amount((claims + sizes)[0]) < needed:
                yield f"{pods.owner}: the kvstore's disk is smaller than its pages"


def scaling_follows_the_oldest_wait(manifests: Sequence[Manifest]) -> Problems:
    workloads = {
        (each["kind"], each["metadata"]["name"]): each for each in of_kind(manifests, "Deployment", "LeaderWorkerSet")
    }
    monitored = [
        label for each in of_kind(manifests, "ServiceMonitor") for label in each["spec"].get("podTargetLabels", [])
    ]
    for scaled in of_kind(manifests, "ScaledObject"):
        target = scaled["spec"]["scaleTargetRef"]
        workload = workloads.get((target.get("kind", "Deployment"), target["name"]))
        if workload is None:
            yield f"{title(scaled)}: there is no {target['name']}"
        elif "replicas" in workload["spec"]:
            yield f"{title(scaled)}: each upgrade sets the replicas that KEDA has chosen back"
        for trigger in scaled["spec"]["triggers"]:
            query = trigger["metadata"]["query"]
            if _METRIC.findall(query) != ["quire_scheduler_oldest_wait_seconds"]:
                yield f"{title(scaled)}: does not ask for the oldest wait"
            if trigger.get("metricType") != "Value":
                yield f"{title(scaled)}: divides a time by the number of engines"
            if workload is not None and f'quire_pool="{workload["metadata"]["labels"]["quire-pool"]}"' not in query:
                yield f"{title(scaled)}: asks for the waits of other pools"
            if monitored and "quire-pool" not in monitored:
                yield f"{title(scaled)}: asks for a label that no monitor adds"
    named = {
        (each["spec"]["scaleTargetRef"].get("kind", "Deployment"), each["spec"]["scaleTargetRef"]["name"])
        for each in of_kind(manifests, "ScaledObject")
    }
    for key, workload in workloads.items():
        if "replicas" not in workload["spec"] and key not in named:
            yield f"{title(workload)}: nobody says how many replicas there are"


def _job(manifests: Sequence[Manifest], service: Manifest, port: str) -> str:
    """The job of deploy/observability of the container that has the port."""
    for pods in pods_of(manifests):
        for container in pods.containers:
            if selects({"matchLabels": service["spec"]["selector"]}, pods.labels) and any(
                each["name"] == port for each in container["ports"]
            ):
                return f"quire-{container['name']}"
    return ""


def monitors_find_ports(manifests: Sequence[Manifest]) -> Problems:
    services = of_kind(manifests, "Service")
    for monitor in of_kind(manifests, "ServiceMonitor"):
        found = [each for each in services if selects(monitor["spec"]["selector"], each["metadata"]["labels"])]
        if len(found) != 1:
            yield f"{title(monitor)}: selects {len(found)} services"
            continue
        ports = {port["name"]: port for port in found[0]["spec"]["ports"]}
        for endpoint in monitor["spec"]["endpoints"]:
            if endpoint["port"] not in ports:
                yield f"{title(monitor)}: there is no port {endpoint['port']}"
            elif [each["replacement"] for each in endpoint["relabelings"]] != [
                _job(manifests, found[0], endpoint["port"])
            ]:
                yield f"{title(monitor)}: alerts know no such job"
            elif ports[endpoint["port"]]["appProtocol"] != endpoint["scheme"]:
                yield f"{title(monitor)}: {endpoint['port']} is not {endpoint['scheme']}"


def routes_lead_to_routers(manifests: Sequence[Manifest]) -> Problems:
    ports = {
        (each["metadata"]["name"], port["port"]): port["name"]
        for each in of_kind(manifests, "Service")
        for port in each["spec"]["ports"]
    }
    hostnames: Counter[str] = Counter()
    for route in of_kind(manifests, "HTTPRoute", "GRPCRoute"):
        wanted = "http" if route["kind"] == "HTTPRoute" else "grpc"
        hostnames.update(route["spec"].get("hostnames", []))
        for rule in route["spec"]["rules"]:
            for backend in rule["backendRefs"]:
                if ports.get((backend["name"], backend["port"])) != wanted:
                    yield f"{title(route)}: {backend['name']}:{backend['port']} is no router's port of {wanted}"
            if wanted == "http" and rule.get("timeouts", {}).get("request") != "0s":
                yield f"{title(route)}: cuts long answers off"
            if any(
                match.get("path", {}).get("value") in ("/", "/metrics")
                for match in rule.get("matches", [{"path": {"value": "/"}}])
            ):
                yield f"{title(route)}: shows metrics to the public"
    for name, count in hostnames.items():
        if count > 1:
            yield f"{name}: a Gateway refuses a GRPCRoute with the hostname of an HTTPRoute"


def accounts_exist(manifests: Sequence[Manifest]) -> Problems:
    names = {each["metadata"]["name"] for each in of_kind(manifests, "ServiceAccount")}
    for pods in pods_of(manifests):
        if pods.spec.get("serviceAccountName") not in names:
            yield f"{pods.owner}: there is no account {pods.spec.get('serviceAccountName')}"


def roles_of_a_set_are_complete(manifests: Sequence[Manifest]) -> Problems:
    """A prefill pool without a decode pool, and the reverse, splits nothing; and workers fetch from known networks."""
    roles = {
        flags_of(each).get("role")
        for pods in pods_of(manifests)
        for each in pods.containers
        if each["name"] == "scheduler"
    }
    if ("prefill" in roles) != ("decode" in roles):
        yield f"there are only the roles {sorted(map(str, roles))}"
    for pods in pods_of(manifests):
        for container in pods.containers:
            flags: Mapping[str, str] = flags_of(container)
            if container["name"] == "worker" and "prefill" in roles and "peer-hosts" not in flags:
                yield f"{pods.owner}: the worker fetches no pages from other hosts"


RULES: tuple[Callable[[Sequence[Manifest]], Problems], ...] = (
    names_are_unique,
    pods_are_restricted,
    service_links_are_off,
    flags_are_accepted,
    images_are_named,
    memory_is_bounded,
    probes_ask_the_service,
    grace_covers_the_drain,
    selectors_fit,
    services_reach_pods,
    addresses_exist,
    files_are_mounted,
    identities_are_certified,
    budgets_cover_pods,
    everything_is_denied_first,
    workers_are_private,
    disks_have_room,
    scaling_follows_the_oldest_wait,
    monitors_find_ports,
    routes_lead_to_routers,
    accounts_exist,
    roles_of_a_set_are_complete,
)


def broken_rules(manifests: Sequence[Manifest]) -> list[str]:
    """Return what all rules find, each with the name of its rule."""
    return [f"{rule.__name__}: {problem}" for rule in RULES for problem in rule(manifests)]
