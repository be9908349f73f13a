"""The source tree of the last release, from git, with its generated stubs: build/release-VERSION."""

from __future__ import annotations

import io
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

from tests.upgrade.launch import python_path

ROOT = Path(__file__).resolve().parents[2]


def release_of(text: str) -> tuple[str, str]:
    """The version and the commit that the file RELEASE names."""
    (line,) = [line for line in text.splitlines() if line and not line.startswith("#")]
    version, commit = line.split()
    return version, commit


def last_release() -> Path:
    """Unpack the last release, unless it is there. Raises FileNotFoundError where this clone has no such commit."""
    version, commit = release_of((ROOT / "RELEASE").read_text())
    tree = ROOT / "build" / f"release-{version}"
    mark = tree / "COMMIT"
    if mark.exists() and mark.read_text() == commit:
        return tree
    shutil.rmtree(tree, ignore_errors=True)
    archive = subprocess.run(["git", "archive", commit], cwd=ROOT, capture_output=True, check=False)
    if archive.returncode != 0:
        raise FileNotFoundError(f"this clone has no commit {commit} of release {version}: git fetch --unshallow")
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
        files.extractall(tree, filter="data")
    environment = {"PYTHONPATH": python_path(tree)}
    subprocess.run([sys.executable, "hatch_build.py"], cwd=tree, env=environment, check=True)
    mark.write_text(commit)
    return tree
