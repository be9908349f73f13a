"""Prometheus' text format, as tests read it from a service's endpoint."""

from __future__ import annotations

import urllib.request
from collections.abc import Mapping
from typing import NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from quire_common.telemetry import vllm_names

LIMIT_S = 30.0
Labels = frozenset[tuple[str, str]]
Samples = dict[str, dict[Labels, float]]


class Difference(NamedTuple):
    """A sample of an alias, and what the source has."""

    name: str
    labels: Labels
    alias: float | None
    source: float | None


def parse(text: str) -> Samples:
    """Values by name and labels."""
    found: Samples = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[frozenset(sample.labels.items())] = sample.value
    return found


def scrape(address: str) -> Samples:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=LIMIT_S) as answer:
        return parse(answer.read().decode())


def total(samples: Samples, name: str, **labels: str) -> float:
    """The sum over all series that have these labels."""
    wanted = frozenset(labels.items())
    return sum(value for found, value in samples.get(name, {}).items() if wanted <= found)


def alias_differences(samples: Samples, names: Mapping[str, str]) -> list[Difference]:
    """Aliases of the table that differ from their source, over all samples of both, in one scrape. The labels are
    compared too: an alias has `engine` more, and lacks what vLLM does not have."""
    differences = []
    for name, source in names.items():
        lacking = {"num_preemptions": {"mode"}}.get(name, set())
        for suffix in ("", "_total", "_bucket", "_count", "_sum"):
            wanted: dict[Labels, float] = {}
            for labels, value in samples.get(source + suffix, {}).items():
                key = frozenset({*(pair for pair in labels if pair[0] not in lacking), ("engine", "0")})
                wanted[key] = wanted.get(key, 0.0) + value
            found = samples.get(f"vllm:{name}{suffix}", {})
            differences += [
                Difference(f"vllm:{name}{suffix}", labels, found.get(labels), wanted.get(labels))
                for labels in wanted.keys() | found.keys()
                if found.get(labels) != wanted.get(labels)
            ]
    return differences


def table_of(service: str) -> Mapping[str, str]:
    """vLLM's names that a service has, with their sources."""
    return {"router": vllm_names.ROUTER, "scheduler": vllm_names.SCHEDULER}[service]
