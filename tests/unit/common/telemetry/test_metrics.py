"""Metrics by their names."""

from __future__ import annotations

import pytest

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
