"""One version, in VERSION, which every package, the chart and every service repeat; and a release that can be found."""

from __future__ import annotations

import datetime
import re
import shutil
from pathlib import Path

import pytest

import quire
from quire_common.config import load_config
from quire_common.version import installed_version
from quire_router.config import RouterConfig
from tests.upgrade.last_release import release_of
from tools import release

ROOT = release.ROOT
TREE = (ROOT / "VERSION").read_text().strip()


def test_every_place_has_the_version_of_the_file() -> None:
    found = list(release.versions())
    assert len(found) >= 20 and {version for _, version in found} == {TREE}, found
    assert quire.__version__ == TREE


def test_no_other_project_file_has_a_version() -> None:
    projects = {str(path.relative_to(ROOT)) for path in ROOT.glob("services/*/pyproject.toml")}
    charts = {str(path.relative_to(ROOT)) for path in ROOT.glob("deploy/**/Chart.yaml")}
    assert projects | charts | {"pyproject.toml"} == set(release.PLACES) - {
        "VERSION",
        "quire/__init__.py",
        "deploy/compose/compose.yaml",
    }


def test_a_service_prints_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        load_config(RouterConfig, "router", ["--version"], {})
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"quire-router {installed_version('quire-router')}\n"


def test_a_release_writes_the_version_everywhere_and_dates_the_changes(tmp_path: Path) -> None:
    for name in (*release.PLACES, release.CHANGELOG):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    release.set_version("7.8.9rc1", tmp_path)
    assert {version for _, version in release.versions(tmp_path)} == {"7.8.9rc1"}
    release.date_changes("7.8.9rc1", datetime.date(2030, 1, 2), tmp_path)
    changelog = (tmp_path / release.CHANGELOG).read_text()
    assert re.search(r"^## Unreleased\n\n## 7\.8\.9rc1 - 2030-01-02\n", changelog, re.MULTILINE)
    with pytest.raises(LookupError):
        release.date_changes("7.8.9", datetime.date(2030, 1, 2), tmp_path)


@pytest.mark.parametrize("version", ["", "1.2", "v1.2.3", "1.2.3-4", "1.2.3\n"])
def test_what_is_no_version_is_refused(version: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is no version"):
        release.set_version(version, tmp_path)


def test_the_changelog_has_the_last_release_and_no_later_one() -> None:
    headings = re.findall(r"^## (.+)$", (ROOT / release.CHANGELOG).read_text(), re.MULTILINE)
    released = [re.fullmatch(r"(\d+\.\d+\.\d+) - \d{4}-\d{2}-\d{2}", heading) for heading in headings[1:]]
    assert headings[0] == "Unreleased" and released and all(released)
    assert released[0] is not None and released[0][1] == last_release()[0]


def last_release() -> tuple[str, str]:
    version, commit = release_of((ROOT / "RELEASE").read_text())
    assert re.fullmatch("[0-9a-f]{40}", commit)
    return version, commit
