"""Metrics by tenant, route and model keep their counts between calls."""

from __future__ import annotations

from quire_common.telemetry.metrics import registry
from quire_router import metrics


def test_tenant_metrics_count_requests_and_tokens() -> None:
    for _ in range(2):
        metrics.of_tenant("tenant-of-test").request_ended(5, 3)
    labels = {"tenant": "tenant-of-test"}
    assert registry.get_sample_value("quire_router_tenant_requests_total", labels) == 2
    for kind, tokens in (("prompt", 10), ("generation", 6)):
        assert registry.get_sample_value("quire_router_tenant_tokens_total", {**labels, "kind": kind}) == tokens


def test_requests_count_by_route_and_status() -> None:
    for status in (200, 200, 404):
        metrics.requests_counter("/of-test", status).inc()
    for code, count in (("200", 2), ("404", 1)):
        labels = {"route": "/of-test", "code": code}
        assert registry.get_sample_value("quire_router_requests_total", labels) == count


def test_metrics_of_a_model_are_made_once() -> None:
    assert metrics.of_model("model-of-test") is metrics.of_model("model-of-test")
    assert metrics.of_model("model-of-test") is not metrics.of_model("other-model-of-test")
