"""Prometheus metrics of data connections."""

from __future__ import annotations

from quire_common.telemetry.metrics import counter, gauge

PATHS = ("tcp", "shm")


class DataMetrics:
    """`path` is tcp or shm."""

    def __init__(self, path: str) -> None:
        label = ("path",)
        self.connections = gauge("quire_kvstore_data_connections", "Data connections.", label).labels(path)
        moved = counter("quire_kvstore_data_bytes_total", "Bytes of pages, of shm those put alone.", ("path", "way"))
        self.bytes_in, self.bytes_out = moved.labels(path, "in"), moved.labels(path, "out")
        self._path = path
        self._refused = counter(
            "quire_kvstore_data_refused_total", "Data connections ended by the store, by reason.", ("path", "reason")
        )

    def refused(self, reason: str) -> None:
        """Count a connection that the store ended. The reason is garbage, forged, oversized, slow, unknown_lease,
        too_many, no_thread or bad_memory."""
        self._refused.labels(self._path, reason).inc()
