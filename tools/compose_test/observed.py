"""Figures of a compose stack, from its metrics."""

from __future__ import annotations

import json
import re
import time
import urllib.parse
import urllib.request
from typing import Any, Final

from tools.compose_test.stack import ComposeStack

_SCRAPED_S: Final = 60.0


def all_targets_up(stack: ComposeStack, errors: list[str]) -> str:
    """Wait until Prometheus scrapes every service of Quire, and has counted tokens. Returns what it found, in words."""
    wanted = {name for name in stack.services if name not in ("redis", "balancer", "prometheus")}
    deadline = time.monotonic() + _SCRAPED_S
    while True:
        up = {each["metric"]["instance"] for each in query(stack, "up == 1")}
        if wanted <= up or time.monotonic() > deadline:
            break
        time.sleep(1.0)
    if missing := wanted - up:
        errors.append(f"Prometheus does not read {', '.join(sorted(missing))}")
    series = query(stack, 'count({__name__=~"quire_.+"})')
    return f"Prometheus reads {len(up)} targets, {series[0]['value'][1] if series else 0} series"


def query(stack: ComposeStack, expression: str) -> list[dict[str, Any]]:
    """Return the result of a query; empty while Prometheus does not answer."""
    url = f"{stack.url('QUIRE_PROMETHEUS_PORT', 'http')}/api/v1/query?{urllib.parse.urlencode({'query': expression})}"
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return list(json.load(answer)["data"]["result"])
    except OSError:
        return []


def pages_moved(stack: ComposeStack, worker: str) -> int:
    """Return the number of KV pages that the worker got from other workers."""
    found = re.findall(
        r'^quire_worker_pages_moved_total\{[^}]*kind="([^"]+)"[^}]*\} (\S+)', stack.metrics(worker), re.MULTILINE
    )
    return sum(int(float(count)) for kind, count in found if kind == "pull")
