"""The chart renders, for each of its uses, what Kubernetes, the custom resources and the services accept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from quire_common.identity.callers import identity_uri
from tests.kube import flags, rules, schemas
from tests.kube.chart import (
    CHART,
    EXAMPLES,
    NAMESPACE,
    RENDERINGS,
    ROOT,
    flags_of,
    helm,
    of_kind,
    one,
    pods_of,
    render,
    rendered,
)

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("name", EXAMPLES)
def test_helm_lints_the_chart_with_each_example(name: str) -> None:
    result = helm("lint", str(CHART), "--strict", f"--values={CHART}/values-{name}.yaml")
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize("name", RENDERINGS)
def test_the_schemas_of_three_versions_and_of_all_custom_resources_accept_it(name: str) -> None:
    problems = [problem for found in schemas.problems_of(rendered(name)) for problem in found]
    assert problems == []


@pytest.mark.parametrize("name", RENDERINGS)
def test_the_manifests_fit_each_other_and_the_services(name: str) -> None:
    assert rules.broken_rules(rendered(name)) == []


@pytest.mark.parametrize("name", RENDERINGS)
def test_the_services_load_the_rendered_flags(name: str) -> None:
    loaded = [
        flags.load(each)
        for pods in pods_of(rendered(name))
        for each in pods.containers
        if each["name"] in flags.SERVICES
    ]
    assert {type(config) for config in loaded} == {flags.config_class(service) for service in flags.SERVICES}


def test_the_example_with_everything_has_each_kind_of_the_chart() -> None:
    kinds = {each["kind"] for name in ("everything", "pd") for each in rendered(name)}
    assert kinds == {
        "BackendTLSPolicy",
        "Certificate",
        "Deployment",
        "DisaggregatedSet",
        "GRPCRoute",
        "HTTPRoute",
        "LeaderWorkerSet",
        "NetworkPolicy",
        "PodDisruptionBudget",
        "ScaledObject",
        "Service",
        "ServiceAccount",
        "ServiceMonitor",
        "StatefulSet",
    }


def test_values_say_what_the_schema_says() -> None:
    """Each default is allowed by the schema, and the schema has no value without a default."""
    values: dict[str, Any] = yaml.safe_load((CHART / "values.yaml").read_text())
    schema = yaml.safe_load((CHART / "values.schema.json").read_text())

    def compare(given: dict[str, Any], known: dict[str, Any], where: str) -> None:
        properties = known.get("properties", {})
        assert set(given) == set(properties) - {"global"}, where
        assert known["additionalProperties"] is False, where
        for name, value in given.items():
            inner = properties[name]
            if isinstance(value, dict) and value and "properties" in inner:
                compare(value, inner, f"{where}.{name}")

    compare(values, schema, "values")


def test_options_become_flags_with_their_types() -> None:
    options = {
        "max-model-len": 1073741824,
        "enforce-eager": True,
        "batch-invariant": False,
        "gpu-memory-utilization": 0.5,
    }
    given = {"pools": [{"name": "a", "options": {"worker": options}}]}
    pods = next(each for each in pods_of(render(CHART / "values-cpu.yaml", values=given)) if each.component == "engine")
    config = flags.load(pods.containers[1])
    loaded = {name: getattr(config, name.replace("-", "_")) for name in options}
    assert loaded == options


def test_a_pool_takes_what_it_does_not_set_from_the_defaults() -> None:
    given = {
        "poolDefaults": {"resources": {"worker": {"limits": {"memory": "9Gi"}}}, "replicas": 3},
        "pools": [{"name": "a"}, {"name": "b", "replicas": 1, "model": {"path": "org/other", "name": "other"}}],
    }
    manifests = render(CHART / "values-cpu.yaml", values=given)
    a, b = (one(manifests, "Deployment", f"engine-{name}")["spec"] for name in "ab")
    assert (a["replicas"], b["replicas"]) == (3, 1)
    workers = [each["template"]["spec"]["containers"][1] for each in (a, b)]
    assert [each["resources"]["limits"]["memory"] for each in workers] == ["9Gi", "9Gi"]
    assert [flags_of(each)["model"] for each in workers] == ["Qwen/Qwen2.5-0.5B-Instruct", "org/other"]
    assert flags_of(workers[1])["served-model-name"] == "other"


def test_each_service_under_tls_has_a_certificate_of_its_own() -> None:
    uris = {uri for each in of_kind(rendered("everything"), "Certificate") for uri in each["spec"].get("uris", [])}
    assert uris == {identity_uri(name) for name in (*flags.SERVICES, "metrics", "operator")}


def test_prefill_and_decode_are_two_sets_or_one() -> None:
    values = {"disaggregatedSet": {"enabled": False}, "poolDefaults": {"workload": "LeaderWorkerSet"}}
    apart = render(CHART / "values-pd.yaml", values=values)
    assert [each["metadata"]["name"] for each in of_kind(apart, "LeaderWorkerSet")] == [
        "quire-engine-prefill",
        "quire-engine-decode",
    ]
    together = one(rendered("pd"), "DisaggregatedSet", "engine")["spec"]["roles"]
    assert [(each["name"], each["spec"]["replicas"]) for each in together] == [("prefill", 2), ("decode", 4)]
    templates = [
        each["spec"]["leaderWorkerTemplate"]["workerTemplate"]
        for each in (*of_kind(apart, "LeaderWorkerSet"), *together)
    ]
    assert templates[:2] == templates[2:], "the pods are the same"


def test_an_engine_of_several_pods_has_one_scheduler() -> None:
    leader, follower = (each for each in pods_of(rendered("ranks")) if each.component.startswith("engine"))
    assert [each["name"] for each in leader.containers] == ["scheduler", "worker"]
    assert [each["name"] for each in follower.containers] == ["worker"]
    assert follower.component == "engine-rank", "no service selects it"


def test_the_namespace_is_the_release_s() -> None:
    for each in rendered("everything"):
        assert each["metadata"].get("namespace", NAMESPACE) == NAMESPACE


def test_no_secret_is_rendered() -> None:
    assert of_kind(rendered("everything"), "Secret", "ConfigMap") == []
    assert not list(Path(CHART).rglob("*.key"))


def test_jobs_of_metrics_are_those_that_alerts_ask_for() -> None:
    monitored = [
        relabeling["replacement"]
        for monitor in of_kind(rendered("everything"), "ServiceMonitor")
        for endpoint in monitor["spec"]["endpoints"]
        for relabeling in endpoint["relabelings"]
    ]
    configured = yaml.safe_load((ROOT / "deploy" / "observability" / "prometheus.yml").read_text())["scrape_configs"]
    assert sorted(monitored) == sorted(each["job_name"] for each in configured)
