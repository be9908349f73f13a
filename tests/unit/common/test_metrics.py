"""The metrics layer and its endpoint."""

from __future__ import annotations

import urllib.request

import pytest

from quire_common.errors import ConfigError
from quire_common.telemetry import metrics


def test_the_same_name_is_the_same_metric() -> None:
    first = metrics.counter("quire_test_events_total", "Events.", ("kind",))
    metrics.counter("quire_test_events_total", "Events.", ("kind",)).labels("a").inc(2)
    first.labels("a").inc()
    assert b'quire_test_events_total{kind="a"} 3.0' in metrics.render()


def test_misuse_is_refused() -> None:
    metrics.gauge("quire_test_depth", "Depth.")
    with pytest.raises(ValueError, match="another type"):
        metrics.counter("quire_test_depth", "Depth.")
    with pytest.raises(ValueError, match="other labels"):
        metrics.gauge("quire_test_depth", "Depth.", ("queue",))
    with pytest.raises(ValueError, match="quire_"):
        metrics.gauge("depth", "Depth.")


def test_the_endpoint_serves_and_closes() -> None:
    metrics.histogram("quire_test_wait_seconds", "Wait.").observe(0.2)
    server = metrics.serve_metrics("127.0.0.1:0")
    with urllib.request.urlopen(f"http://{server.address}/metrics", timeout=30) as response:
        body = response.read()
    assert b"quire_test_wait_seconds_count 1.0" in body and b"process_resident_memory_bytes" in body
    with pytest.raises(ConfigError) as caught:
        metrics.serve_metrics(server.address)
    assert caught.value.code == "PORT_IN_USE" and server.address in caught.value.message
    server.close()
    metrics.serve_metrics(server.address).close()
