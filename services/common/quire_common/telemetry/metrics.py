"""Metrics: a thin layer on prometheus_client with one registry per process and names that start with `quire_`.

Asking twice for a metric gives the same one. Labels must have few values: never request ids, addresses of clients or
anything that a request can choose. The endpoint has a port of its own.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, TypeVar

from prometheus_client import Counter, Gauge, Histogram, ProcessCollector, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from quire_common.config import split_address
from quire_common.serving.listen_errors import listen_error
from quire_common.telemetry.metrics_registry import Alias, MetricsRegistry
from quire_common.telemetry.metrics_server import MetricsServer, Probes

if TYPE_CHECKING:
    import ssl
    from collections.abc import Callable, Sequence

    from prometheus_client.metrics import MetricWrapperBase

__all__ = [
    "CONTENT_TYPE",
    "LATENCY_BUCKETS_S",
    "Alias",
    "counter",
    "gauge",
    "histogram",
    "registry",
    "render",
    "serve_metrics",
]

CONTENT_TYPE = CONTENT_TYPE_LATEST
LATENCY_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
M = TypeVar("M", bound="MetricWrapperBase")

registry = MetricsRegistry()
ProcessCollector(registry=registry)
_metrics: dict[str, MetricWrapperBase] = {}
_lock = threading.Lock()


def counter(name: str, help_text: str, labels: Sequence[str] = ()) -> Counter:
    """A count that only grows; its name ends in `_total`."""
    return _metric(Counter, name, labels, lambda: Counter(name, help_text, labels, registry=registry))


def gauge(name: str, help_text: str, labels: Sequence[str] = ()) -> Gauge:
    """A value that goes up and down."""
    return _metric(Gauge, name, labels, lambda: Gauge(name, help_text, labels, registry=registry))


def histogram(
    name: str, help_text: str, labels: Sequence[str] = (), buckets: Sequence[float] = LATENCY_BUCKETS_S
) -> Histogram:
    """Return the histogram of this name, made at its first use; `buckets` are upper bounds in the unit that the name
    says, and those of later uses are ignored. Raises ValueError for a name without `quire_`, or one that exists with
    another type or other labels."""
    return _metric(
        Histogram, name, labels, lambda: Histogram(name, help_text, labels, buckets=buckets, registry=registry)
    )


def render() -> bytes:
    """All metrics in Prometheus' text format (CONTENT_TYPE)."""
    return generate_latest(registry)


def serve_metrics(address: str, probes: Probes, context: ssl.SSLContext | None = None) -> MetricsServer:
    """Start an HTTP server of `/metrics`, `/livez` and `/readyz` on `host:port` (0: a free port), over TLS if there is
    a context, and return it. Raises ConfigError for a bad address, or one at which it cannot listen, such as a port
    that is taken."""
    host, port = split_address(address, "metrics_listen")
    try:
        return MetricsServer(host, port, registry, probes, context)
    except OSError as error:
        raise listen_error(error, "The metrics port", address, "--metrics-listen") from error


def _metric(kind: type[M], name: str, labels: Sequence[str], make: Callable[[], M]) -> M:
    """Return the metric of this name; the first call makes it. Raises ValueError for a name without `quire_`, or one
    that exists with another type or other labels."""
    if not name.startswith("quire_"):
        raise ValueError(f"metric {name!r} does not start with quire_")
    with _lock:
        metric = _metrics.get(name)
        if metric is None:
            metric = _metrics[name] = make()
        if not isinstance(metric, kind) or tuple(metric._labelnames) != tuple(labels):
            raise ValueError(f"metric {name!r} exists already with another type or other labels")
        return metric
