"""podman-compose reads the compose file of the stack."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.unit.deployment.test_compose import ALWAYS, FILE, MEMBERS


@pytest.mark.skipif(not shutil.which("podman"), reason="podman is not installed: apt-get install podman")
@pytest.mark.parametrize("profile", ["two", "pd"])
def test_podman_compose_reads_it(profile: str) -> None:
    command = [str(Path(sys.executable).with_name("podman-compose")), "-f", str(FILE), "--profile", profile, "config"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=180, check=False)
    assert result.returncode == 0, result.stderr
    assert set(yaml.safe_load(result.stdout)["services"]) == MEMBERS[profile] | ALWAYS
