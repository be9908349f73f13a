"""The commit of the last release, which the file RELEASE names."""

from __future__ import annotations

import subprocess

import pytest

from tests.upgrade.last_release import release_of
from tools.release import ROOT


def test_the_commit_of_the_last_release_has_its_version() -> None:
    version, commit = release_of((ROOT / "RELEASE").read_text())
    there = subprocess.run(["git", "cat-file", "-e", commit], cwd=ROOT, capture_output=True, check=False)
    if there.returncode != 0:
        pytest.skip("this clone does not have the release's commit")
    shown = subprocess.run(
        ["git", "show", f"{commit}:pyproject.toml"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert f'version = "{version}"' in shown.stdout
