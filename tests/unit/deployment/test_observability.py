"""Dashboards, alerts, their tests and their runbook fit each other, and name metrics that exist."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from tools.dashboard_panels import DASHBOARDS
from tools.grafana_dashboards import FOLDER, render

ROOT = Path(__file__).resolve().parents[3]
OBSERVABILITY = ROOT / "deploy" / "observability"
ALERTS: list[dict[str, Any]] = yaml.safe_load((OBSERVABILITY / "alerts.yml").read_text())["groups"][0]["rules"]
RUNBOOK = (ROOT / "docs" / "runbooks.md").read_text()
METRICS: dict[str, Any] = json.loads((ROOT / "tests" / "contract" / "frozen" / "metrics.json").read_text())
# Metrics of Prometheus and of its client's process collector.
FOREIGN = {"up", "process_start_time_seconds", "process_resident_memory_bytes", "process_cpu_seconds_total"}
_METRIC = re.compile(r"\b(quire_\w+|process_\w+|up)\b(?=[{\[\s)]|$)")


def metrics_of(expression: str) -> set[str]:
    return set(_METRIC.findall(re.sub(r'"[^"]*"', '""', expression)))


def sources() -> str:
    return "\n".join(path.read_text() for path in sorted((ROOT / "services").rglob("*.py")))


def exists(metric: str, text: str) -> bool:
    """Whether a service's code names the metric: whole or, where a prefix is joined to it, its end."""
    family = re.sub(r"_(bucket|count|sum)$", "", metric)
    prefixes = ("quire_scheduler_", "quire_kvstore_", "quire_worker_gpu_")
    ends = (family, *(family.removeprefix(prefix) for prefix in prefixes))
    return family in FOREIGN or any(f'"{end}"' in text for end in (*ends, family.removesuffix("_total")))


def expressions() -> list[tuple[str, str]]:
    found = [(alert["alert"], alert["expr"]) for alert in ALERTS]
    return found + [
        (f"{dashboard.name}: {panel.title}", expression)
        for dashboard in DASHBOARDS
        for panel in dashboard.panels
        for expression, _ in panel.queries
    ]


def test_every_expression_names_metrics_that_a_service_has() -> None:
    text = sources()
    assert len(expressions()) > 80
    missing = {
        f"{where}: {metric}"
        for where, expression in expressions()
        for metric in metrics_of(expression)
        if not exists(metric, text)
    }
    assert not missing
    assert not exists("quire_router_no_such_total", text), "this test would notice"
    assert all(metrics_of(expression) for _, expression in expressions())


def test_each_alert_has_its_section_in_the_runbook_and_each_section_its_alert() -> None:
    sections = re.findall(r"^## (Quire\w+)$", RUNBOOK, re.MULTILINE)
    assert sections == [alert["alert"] for alert in ALERTS]
    for alert in ALERTS:
        assert alert["annotations"]["runbook"] == f"docs/runbooks.md#{alert['alert'].lower()}"
        assert alert["labels"]["severity"] in ("warning", "critical")


@pytest.mark.parametrize("section", RUNBOOK.split("\n## ")[1:], ids=lambda section: section.split("\n")[0])
def test_each_section_says_what_the_alert_means_and_what_to_do(section: str) -> None:
    assert "**Meaning:**" in section and re.search(r"^1\. ", section, re.MULTILINE)


def test_each_alert_is_tested_quiet_and_firing() -> None:
    tests = yaml.safe_load((OBSERVABILITY / "alerts_test.yml").read_text())["tests"]
    told: dict[str, list[bool]] = {}
    for case in (case for test in tests for case in test["alert_rule_test"]):
        told.setdefault(case["alertname"], []).append(bool(case["exp_alerts"]))
    assert told == {alert["alert"]: [False, True] for alert in ALERTS}


@pytest.mark.parametrize("dashboard", DASHBOARDS, ids=lambda dashboard: str(dashboard.name))
def test_dashboards_are_written_anew_when_their_panels_change(dashboard: Any) -> None:
    written = (FOLDER / f"{dashboard.name}.json").read_text()
    assert written == render(dashboard) + "\n", "run python -m tools.grafana_dashboards"
    panels = json.loads(written)["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) == len(dashboard.panels)
    assert all(panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24 for panel in panels)
    places = {(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}
    assert len(places) == len(panels)


def test_there_is_a_dashboard_for_each_subject_and_none_is_left_over() -> None:
    assert {dashboard.name for dashboard in DASHBOARDS} == {"fleet", "engine", "kv", "pd", "tenants"}
    assert {file.stem for file in FOLDER.glob("*.json")} == {dashboard.name for dashboard in DASHBOARDS}
