"""`helm upgrade` and `helm rollback`, as templates: nothing changes that Kubernetes refuses to change."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.kube import chart
from tests.kube.chart import CHART, NAMESPACE, RELEASE, RENDERINGS, helm, of_kind, render, rendered, title
from tests.kube.first_release import FIRST
from tests.kube.immutable import changes, frozen

pytestmark = pytest.mark.slow


def test_the_first_release_can_be_upgraded_to_this_chart() -> None:
    first = json.loads(FIRST.read_text())
    for name, objects in first.items():
        now = frozen(rendered(name))
        assert changes(objects, now) == [], name
        claims = {each for each in objects if each.startswith(("StatefulSet/", "Service/"))}
        assert claims <= set(now), "a volume or an address that a release has is not given up"


@pytest.mark.parametrize("name", RENDERINGS)
def test_values_may_change_and_change_back(name: str, tmp_path: Path) -> None:
    """An upgrade to another version of the chart with other values, and the rollback."""
    copied = tmp_path / "quire"
    shutil.copytree(CHART, copied)
    meta = yaml.safe_load((copied / "Chart.yaml").read_text())
    (copied / "Chart.yaml").write_text(yaml.safe_dump(meta | {"version": "9.9.9", "appVersion": "9.9.9"}))
    values = {
        "images": {"tag": "next"},
        "router": {"replicas": 5, "options": {"max-n": 4}},
        "kvstore": {"replicas": 3, "ramGiB": 2, "options": {"max-leases": 64}},
        "drain": {"timeoutSeconds": 120},
        "podLabels": {"team": "llm"},
        "podAnnotations": {"note": "next"},
        "poolDefaults": {"replicas": 7, "cacheGiB": 50},
    }
    files = [f"--values={CHART}/values-{name}.yaml"] if (CHART / f"values-{name}.yaml").exists() else []
    base = [] if files else [f"--values={_written(tmp_path / 'base.json', name)}"]
    over = f"--values={_written(tmp_path / 'over.json', values)}"
    result = helm("template", RELEASE, str(copied), f"--namespace={NAMESPACE}", *files, *base, over)
    assert result.returncode == 0, result.stderr
    new = [each for each in yaml.safe_load_all(result.stdout) if each]
    old = rendered(name)
    assert {title(each) for each in old} == {title(each) for each in new}
    assert changes(frozen(old), frozen(new)) == []
    changed = [title(each) for each in new if each not in old]
    assert "Deployment/quire-router" in changed, "the upgrade does something"
    for before, after in zip(of_kind(old, "Deployment"), of_kind(new, "Deployment"), strict=True):
        assert before["spec"]["template"] != after["spec"]["template"], "each pod is rolled out"


def _written(path: Path, content: Any) -> Path:
    values = {"everything": chart.EVERYTHING, "ranks": chart.RANKS}[content] if isinstance(content, str) else content
    path.write_text(json.dumps(values))
    return path


def test_a_rendering_says_the_same_each_time() -> None:
    """A rollback applies the stored manifests. An upgrade with equal values must do nothing."""
    first, second = (render(CHART / "values-gpu.yaml") for _ in range(2))
    assert first == second


def test_a_selector_that_changes_is_seen() -> None:
    old, new = rendered("cpu"), rendered("cpu")
    for each in of_kind(new, "Deployment"):
        each["spec"]["selector"]["matchLabels"]["helm.sh/chart"] = "quire-2"
    assert len(changes(frozen(old), frozen(new))) == len(of_kind(new, "Deployment")) > 0


def test_a_disk_that_grows_is_seen() -> None:
    """docs/kubernetes.md says what to do then."""
    old = render(CHART / "values-gpu.yaml")
    new = render(CHART / "values-gpu.yaml", values={"kvstore": {"diskGiB": 1024}})
    assert changes(frozen(old), frozen(new)) == ["StatefulSet/quire-kvstore"]
