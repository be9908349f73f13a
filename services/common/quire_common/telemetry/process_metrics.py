"""Metrics of a service's own process: its build, and the lag of its event loop."""

from __future__ import annotations

import asyncio
import platform

from quire_common.telemetry.metrics import gauge, histogram
from quire_common.version import installed_version

_LAG_INTERVAL_S = 0.25
_LAG_BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
_build = gauge("quire_build_info", "1; its labels say what runs.", ("service", "version", "python"))
_loop_lag = histogram(
    "quire_event_loop_lag_seconds", "How much later than asked the event loop woke a timer.", buckets=_LAG_BUCKETS_S
)


def show_build(service: str) -> None:
    """Set the metric with this process's service, version and Python."""
    _build.labels(service, installed_version(f"quire-{service}"), platform.python_version()).set(1)


async def watch_loop_lag() -> None:
    """Every 0.25 s, record how many seconds later than asked the running loop wakes this task, until the task is
    cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + _LAG_INTERVAL_S
        await asyncio.sleep(_LAG_INTERVAL_S)
        _loop_lag.observe(max(0.0, loop.time() - due))
