"""The compose stack: valid by the specification, hardened, and with flags that the services really take."""

from __future__ import annotations

import dataclasses
import importlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from quire_common.config import load_config
from quire_common.serving.health import LIVENESS, READINESS

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "deploy" / "compose" / "compose.yaml"
OURS = ("router", "tokenizer", "scheduler", "worker", "kvstore")
SECOND = ("tokenizer-2", "scheduler-2", "worker-2")


@pytest.fixture(scope="module")
def stack() -> dict[str, Any]:
    return dict(yaml.safe_load(FILE.read_text()))


def test_fits_the_compose_specification(stack: dict[str, Any]) -> None:
    compose_spec = pytest.importorskip("compose_spec")
    parsed = compose_spec.PyCompose.from_yaml(yaml.safe_dump(stack))  # merge keys resolved
    parsed.validate()
    assert set(parsed.service_names()) == {*OURS, *SECOND, "redis"}


@pytest.mark.skipif(not shutil.which("podman"), reason="podman is not installed: apt-get install podman")
def test_podman_compose_reads_it() -> None:
    command = [str(Path(sys.executable).with_name("podman-compose")), "-f", str(FILE), "config"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert result.returncode == 0, result.stderr
    assert set(yaml.safe_load(result.stdout)["services"]) == {*OURS, "redis"}


@pytest.mark.parametrize("name", OURS)
def test_flags_are_real(stack: dict[str, Any], name: str) -> None:
    """Every command line parses into the service's own config."""
    module = importlib.import_module(f"quire_{name}.config")
    cls = getattr(module, f"{name.capitalize()}Config", None) or module.KvstoreConfig
    load_config(cls, name, stack["services"][name]["command"], {})


@pytest.mark.parametrize("name", [*OURS, *SECOND, "redis"])
def test_containers_are_hardened(stack: dict[str, Any], name: str) -> None:
    service = stack["services"][name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in service["security_opt"]
    assert not service["user"].startswith("0")
    assert service["healthcheck"]["test"][0] == "CMD"
    assert ("ports" in service) == (name == "router")


@pytest.mark.parametrize("name", [*OURS, *SECOND])
def test_compose_waits_for_readiness_and_images_report_liveness(stack: dict[str, Any], name: str) -> None:
    """What waits for a service wants it ready. What restarts unhealthy containers must not end a worker that loads."""
    service = stack["services"][name]
    port = service["command"][service["command"].index("--listen") + 1].rpartition(":")[2]
    probe = ["CMD", "python", "-m", "quire_common.healthcheck", f"127.0.0.1:{port}"]
    assert service["healthcheck"]["test"] == [*probe, READINESS]
    dockerfile = (ROOT / service["build"]["dockerfile"]).read_text()
    (command,) = [line for line in dockerfile.splitlines() if "quire_common.healthcheck" in line]
    assert json.loads(command.replace("CMD", "")) == [*probe[1:], LIVENESS]


def test_only_loopback_is_published(stack: dict[str, Any]) -> None:
    assert all(port.startswith("127.0.0.1:") for port in stack["services"]["router"]["ports"])
    assert stack["networks"]["engine"]["internal"] is True


@pytest.mark.parametrize("name", OURS)
def test_build_files_exist(stack: dict[str, Any], name: str) -> None:
    build = stack["services"][name]["build"]
    dockerfile = (FILE.parent / build["context"] / build["dockerfile"]).resolve()
    copied = [
        source
        for line in dockerfile.read_text().splitlines()
        if line.startswith("COPY ") and "--from" not in line
        for source in line.split()[1:-1]
    ]
    missing = [s for s in copied if not (ROOT / s).exists()]
    assert not missing, f"{dockerfile} copies {missing}"


def test_the_second_replica_is_a_pair_of_its_own(stack: dict[str, Any]) -> None:
    for name in SECOND:
        original, services = name.removesuffix("-2"), stack["services"]
        assert services[name]["profiles"] == ["two"]
        module = importlib.import_module(f"quire_{original}.config")
        config = getattr(module, f"{original.capitalize()}Config")
        before = load_config(config, original, services[original]["command"], {})
        now = load_config(config, original, services[name]["command"], {})
        renamed = {"advertise": now.advertise.replace(f"{name}:", f"{original}:")}
        if original == "scheduler":
            assert now.worker == "worker-2:50053"
            renamed["worker"] = now.worker.replace("worker-2:", "worker:")
        assert dataclasses.replace(now, **renamed) == before
        assert original == "worker" or now.advertise.startswith(f"{name}:")
