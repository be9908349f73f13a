"""A configuration of Envoy from the chart's routes, as a Gateway makes one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tests.chaos.routers.envoy import listener
from tests.kube.chart import Manifest, of_kind

# Host and port.
Address = tuple[str, int]
# Addresses where routers listen, in place of a service's name and port.
Backends = Mapping[Address, Sequence[Address]]
_TYPE = "type.googleapis.com/envoy.extensions"
_HTTP2 = {
    "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
        "@type": f"{_TYPE}.upstreams.http.v3.HttpProtocolOptions",
        "explicit_http_config": {"http2_protocol_options": {}},
    }
}


def config_of(
    manifests: Sequence[Manifest], backends: Backends, probed: Sequence[Address], port: int, admin_port: int
) -> str:
    """Return Envoy's configuration: a virtual host for each route, and a cluster for each backend. `probed` are the
    HTTP addresses of the routers, which are asked as the chart's readiness probe says."""
    probe = next(
        each["spec"]["template"]["spec"]["containers"][0]["readinessProbe"]
        for each in of_kind(manifests, "Deployment")
        if each["metadata"]["name"].endswith("-router")
    )
    services = {each["metadata"]["name"]: each["spec"]["ports"] for each in of_kind(manifests, "Service")}
    hosts, clusters = [], {}
    for route in of_kind(manifests, "HTTPRoute", "GRPCRoute"):
        routes = []
        for rule in route["spec"]["rules"]:
            backend = rule["backendRefs"][0]
            name = f"{backend['name']}:{backend['port']}"
            protocol = next(
                each["appProtocol"] for each in services[backend["name"]] if each["port"] == backend["port"]
            )
            addresses = backends[backend["name"], backend["port"]]
            clusters[name] = _cluster(name, addresses, probed, probe, http2=protocol == "kubernetes.io/h2c")
            routes += [{"match": match, "route": {"cluster": name, **_action(rule)}} for match in _matches(rule)]
        hosts.append({"name": route["kind"], "domains": route["spec"].get("hostnames", ["*"]), "routes": routes})
    http: dict[str, object] = {
        "stat_prefix": "gateway",
        "http_filters": [
            {"name": "envoy.filters.http.router", "typed_config": {"@type": f"{_TYPE}.filters.http.router.v3.Router"}}
        ],
        "route_config": {"virtual_hosts": hosts},
    }
    listeners = [listener(port, "http_connection_manager.v3.HttpConnectionManager", http)]
    admin = {"address": {"socket_address": {"address": "127.0.0.1", "port_value": admin_port}}}
    resources = {"listeners": listeners, "clusters": list(clusters.values())}
    return json.dumps({"admin": admin, "static_resources": resources})


def _matches(rule: Mapping[str, Any]) -> list[dict[str, object]]:
    found: list[dict[str, object]] = []
    for match in rule["matches"]:
        if "path" in match:
            assert match["path"]["type"] == "PathPrefix"
            found.append({"path_separated_prefix": match["path"]["value"]})
        else:
            found.append({"prefix": f"/{match['method']['service']}/", "grpc": {}})
    return found


def _action(rule: Mapping[str, Any]) -> dict[str, object]:
    action: dict[str, object] = {"timeout": rule.get("timeouts", {}).get("request", "0s")}
    if "retry" in rule:
        predicate = "envoy.retry_host_predicates.previous_hosts"
        typed = {"@type": f"{_TYPE}.retry.host.previous_hosts.v3.PreviousHostsPredicate"}
        action["retry_policy"] = {
            "retry_on": "connect-failure,reset,retriable-status-codes",
            "retriable_status_codes": rule["retry"]["codes"],
            "num_retries": rule["retry"]["attempts"],
            "retry_host_predicate": [{"name": predicate, "typed_config": typed}],
            "host_selection_retry_max_attempts": 3,
        }
    return action


def _cluster(
    name: str, addresses: Sequence[Address], probed: Sequence[Address], probe: Mapping[str, Any], *, http2: bool
) -> dict[str, object]:
    endpoints = [
        {
            "endpoint": {
                "address": {"socket_address": {"address": host, "port_value": port}},
                "health_check_config": {"port_value": asked},
            }
        }
        for (host, port), (_, asked) in zip(addresses, probed, strict=True)
    ]
    check = {
        "timeout": f"{probe['timeoutSeconds']}s",
        "interval": f"{probe['periodSeconds']}s",
        "no_traffic_interval": f"{probe['periodSeconds']}s",
        "unhealthy_threshold": probe["failureThreshold"],
        "healthy_threshold": 1,
        "http_health_check": {"path": probe["httpGet"]["path"], "codec_client_type": "HTTP1"},
    }
    return {
        "name": name,
        "type": "STATIC",
        "connect_timeout": "1s",
        "load_assignment": {"cluster_name": name, "endpoints": [{"lb_endpoints": endpoints}]},
        "health_checks": [check],
        "common_lb_config": {"healthy_panic_threshold": {"value": 0}},
        # Envoy's own limit is three retries at a time.
        "circuit_breakers": {"thresholds": [{"max_retries": 1024}]},
        **({"typed_extension_protocol_options": _HTTP2} if http2 else {}),
    }
