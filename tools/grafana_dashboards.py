"""Write the Grafana dashboards of deploy/observability from the tables of `dashboard_panels`:

python -m tools.grafana_dashboards
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tools.dashboard_panels import DASHBOARDS, Dashboard, Panel

FOLDER = Path(__file__).resolve().parents[1] / "deploy" / "observability" / "dashboards"
_COLUMNS, _WIDTH, _HEIGHT = 3, 8, 8
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}


def render(dashboard: Dashboard) -> str:
    """Return the JSON of a dashboard."""
    panels = [_panel(number, panel) for number, panel in enumerate(dashboard.panels)]
    return json.dumps(
        {
            "uid": f"quire-{dashboard.name}",
            "title": f"Quire / {dashboard.title}",
            "description": dashboard.text,
            "tags": ["quire"],
            "schemaVersion": 39,
            "version": 1,
            "editable": True,
            "refresh": "10s",
            "time": {"from": "now-30m", "to": "now"},
            "timezone": "browser",
            "graphTooltip": 1,
            "links": [
                {"type": "dashboards", "tags": ["quire"], "title": "Quire", "asDropdown": True, "includeVars": True}
            ],
            "templating": {"list": [_source_variable(), _model_variable()]},
            "panels": panels,
        },
        indent=1,
    )


def write() -> None:
    """Write every dashboard, and remove files of dashboards that no longer exist."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    files = {FOLDER / f"{dashboard.name}.json": render(dashboard) for dashboard in DASHBOARDS}
    for file in set(FOLDER.glob("*.json")) - files.keys():
        file.unlink()
    for file, text in files.items():
        file.write_text(text + "\n")


def _panel(number: int, panel: Panel) -> dict[str, Any]:
    row, column = divmod(number, _COLUMNS)
    return {
        "id": number + 1,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.text,
        "datasource": _SOURCE,
        "gridPos": {"x": column * _WIDTH, "y": row * _HEIGHT, "w": _WIDTH, "h": _HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0, "custom": {"fillOpacity": 8}}, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom"},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
        "targets": [
            {"refId": chr(ord("A") + index), "datasource": _SOURCE, "expr": expression, "legendFormat": legend}
            for index, (expression, legend) in enumerate(panel.queries)
        ],
    }


def _source_variable() -> dict[str, Any]:
    return {"name": "datasource", "label": "Prometheus", "type": "datasource", "query": "prometheus"}


def _model_variable() -> dict[str, Any]:
    return {
        "name": "model",
        "label": "Model",
        "type": "query",
        "datasource": _SOURCE,
        "query": {"query": "label_values(quire_scheduler_requests_running, model_name)", "refId": "model"},
        "refresh": 2,
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
    }


if __name__ == "__main__":
    write()
