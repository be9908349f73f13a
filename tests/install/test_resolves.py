"""All that Quire requires resolves on an ordinary machine: for each Python, against the package index alone.

Folders of wheels and further indexes that this machine's pip knows are left out: they have builds of torch that nobody
else gets. pip reads environment markers of the Python that runs it, so these tests ask for wheels and versions of the
other Pythons, not for their markers. Needs the network: `make test-install`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SERVICES = ("common", "router", "tokenizer", "scheduler", "worker", "kvstore")
PROJECTS = ("", *(f"services/{service}" for service in SERVICES))
BUILD_TOOLS = ("hatchling", "editables", "grpcio-tools", "setuptools")
OURS = "quire"

pytestmark = pytest.mark.slow


def _requirements() -> list[str]:
    """Of all distributions with their extras, and of building and testing them."""
    found: set[str] = {*BUILD_TOOLS}
    for folder in PROJECTS:
        project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
        extras = project.get("optional-dependencies", {}).values()
        found.update(project["dependencies"], *extras)
    return sorted(r for r in found if not r.startswith(OURS))


def _clean_environment() -> dict[str, str]:
    """pip without the machine's settings, but for the package index and how it is reached."""
    listed = subprocess.run([sys.executable, "-m", "pip", "config", "list"], capture_output=True, text=True, check=True)
    settings = dict(line.split("=", 1) for line in listed.stdout.splitlines())
    index = [v.strip("'") for k, v in settings.items() if k.rpartition(".")[2] == "index-url"]
    kept = ("PIP_CERT", "PIP_DEFAULT_TIMEOUT", "PIP_PROXY")
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PIP_") or k in kept}
    clean |= {"PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    return clean | ({"PIP_INDEX_URL": index[-1]} if index else {})


@pytest.fixture(scope="module")
def pip(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A Python whose pip resolves by metadata alone: older ones download all of CUDA for a dry run."""
    home = tmp_path_factory.mktemp("pip")
    subprocess.run([sys.executable, "-m", "venv", str(home)], check=True)
    python = str(home / "bin" / "python")
    subprocess.run([python, "-m", "pip", "install", "-q", "--upgrade", "pip>=25"], check=True, env=_clean_environment())
    return python


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13"])
def test_everything_resolves(version: str, pip: str, tmp_path: Path) -> None:
    report = tmp_path / "report.json"
    command = [pip, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet", "--report", str(report)]
    command += ["--python-version", version, "--only-binary", ":all:", "--target", str(tmp_path / "target")]
    command += ["--constraint", "constraints.txt", "--requirement", "requirements-dev.txt", *_requirements()]
    done = subprocess.run(command, cwd=ROOT, env=_clean_environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    packages = [package["metadata"] for package in json.loads(report.read_text())["install"]]
    chosen = {package["name"].lower(): package["version"] for package in packages}
    print(f"Python {version}: {len(chosen)} packages, torch {chosen['torch']}, triton {chosen['triton']}")
    assert chosen["torch"].partition("+")[0] == "2.13.0"
