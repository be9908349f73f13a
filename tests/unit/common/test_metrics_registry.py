"""The registry adds the model's name and aliases while metrics are read."""

from __future__ import annotations

import pytest
from prometheus_client import Counter, Gauge, Histogram, generate_latest

from quire_common.telemetry import vllm_names
from quire_common.telemetry.metrics_registry import Alias, MetricsRegistry

ENGINE = {"engine": "0"}


def values(registry: MetricsRegistry, name: str) -> dict[tuple[tuple[str, str], ...], float]:
    """Samples of this name, by their labels in order."""
    return {
        tuple(sorted(sample.labels.items())): sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name == name
    }


def test_metrics_of_a_service_carry_the_model_as_soon_as_it_is_known() -> None:
    registry = MetricsRegistry()
    counter = Counter("quire_one_events_total", "Events.", ("kind",), registry=registry)
    Gauge("quire_other_depth", "Depth.", registry=registry).set(3)
    counter.labels("a").inc(2)
    assert values(registry, "quire_one_events_total") == {(("kind", "a"),): 2.0}
    registry.name_model("quire_one_", "llama")
    assert values(registry, "quire_one_events_total") == {(("kind", "a"), ("model_name", "llama")): 2.0}
    registry.name_model("quire_one_", "qwen")
    counter.labels("a").inc()
    assert values(registry, "quire_one_events_total") == {(("kind", "a"), ("model_name", "qwen")): 3.0}
    assert values(registry, "quire_other_depth") == {(): 3.0}


def test_an_alias_repeats_every_sample_of_its_source() -> None:
    registry = MetricsRegistry()
    wait = Histogram("quire_wait_seconds", "Wait.", ("queue",), buckets=(1.0, 2.0), registry=registry)
    registry.add_aliases([Alias("quire_wait_seconds", "vllm:wait_seconds", (), ENGINE)])
    for seconds in (0.5, 1.5, 7.0):
        wait.labels("a").observe(seconds)
    for suffix in ("bucket", "count", "sum"):
        source = values(registry, f"quire_wait_seconds_{suffix}")
        alias = values(registry, f"vllm:wait_seconds_{suffix}")
        assert source and alias == {
            tuple(sorted((*labels, ("engine", "0")))): value for labels, value in source.items()
        }
    assert not values(registry, "vllm:wait_seconds_created")


def test_an_alias_adds_up_what_differs_in_a_label_that_it_lacks() -> None:
    registry = MetricsRegistry()
    ends = Counter("quire_ends_total", "Ends.", ("mode", "kind"), registry=registry)
    registry.add_aliases([Alias("quire_ends", "vllm:num_ends", ("mode",))])
    for mode, kind, times in (("x", "a", 1), ("y", "a", 2), ("x", "b", 4)):
        ends.labels(mode, kind).inc(times)
    assert values(registry, "vllm:num_ends_total") == {(("kind", "a"),): 3.0, (("kind", "b"),): 4.0}


def test_an_alias_that_is_added_twice_is_there_once() -> None:
    registry = MetricsRegistry()
    Gauge("quire_depth", "Depth.", registry=registry).set(1)
    for _ in range(2):
        registry.add_aliases([Alias("quire_depth", "vllm:depth")])
    assert [family.name for family in registry.collect()] == ["quire_depth", "vllm:depth"]


def test_metrics_that_are_asked_for_by_name_have_the_models_label_and_aliases() -> None:
    registry = MetricsRegistry()
    Gauge("quire_depth", "Depth.", registry=registry).set(1)
    Histogram("quire_wait_seconds", "Wait.", buckets=(1.0,), registry=registry).observe(0.5)
    registry.name_model("quire_", "llama")
    registry.add_aliases([Alias("quire_depth", "vllm:depth", (), ENGINE)])
    wanted = ["quire_depth", "vllm:depth", "quire_wait_seconds_count", "quire_unknown"]
    lines = generate_latest(registry.restricted_registry(wanted)).decode().splitlines()
    assert sorted(line for line in lines if not line.startswith("#")) == [
        'quire_depth{model_name="llama"} 1.0',
        'quire_wait_seconds_count{model_name="llama"} 1.0',
        'vllm:depth{engine="0",model_name="llama"} 1.0',
    ]
    assert len(generate_latest(registry.restricted_registry(["vllm:depth"])).splitlines()) == 3, "an alias alone"
    assert not generate_latest(registry.restricted_registry(["quire_unknown"]))


@pytest.mark.parametrize("service", ["router", "scheduler"])
def test_vllms_names_are_added_only_where_asked_for(service: str) -> None:
    registry = MetricsRegistry()
    for alias in vllm_names.aliases(service):
        Gauge(alias.source, "Anything.", registry=registry).set(1)
    vllm_names.add_compatible_names(registry, vllm_names.NONE, service)
    assert not [family.name for family in registry.collect() if family.name.startswith("vllm:")]
    vllm_names.add_compatible_names(registry, vllm_names.VLLM, service)
    assert len([family.name for family in registry.collect() if family.name.startswith("vllm:")]) >= 9


def test_each_of_vllms_names_comes_from_one_service() -> None:
    assert not set(vllm_names.ROUTER) & set(vllm_names.SCHEDULER)
