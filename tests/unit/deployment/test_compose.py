"""The compose stack: valid by the specification, hardened, and with settings that the services really take."""

from __future__ import annotations

import dataclasses
import importlib
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from quire_common.config import ServiceConfig, load_config
from quire_common.healthcheck import HealthcheckConfig
from quire_common.serving.health import READINESS

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "deploy" / "compose"
FILE = FOLDER / "compose.yaml"
REPLICAS = {
    "router": ("router", "router-2"),
    "tokenizer": ("tokenizer", "tokenizer-2"),
    "scheduler": ("scheduler", "scheduler-2", "scheduler-prefill", "scheduler-decode", "scheduler-gpu"),
    "worker": ("worker", "worker-2", "worker-prefill", "worker-decode", "worker-gpu"),
    "kvstore": ("kvstore",),
}
OURS = [(service, name) for service, names in REPLICAS.items() for name in names]
OTHERS = ("secrets", "redis", "balancer", "prometheus")
EVERY = [*(name for _, name in OURS), *OTHERS]
PUBLISHED = ("router", "router-2", "balancer", "prometheus")
# Services of a profile's stack, beside those of every profile.
MEMBERS = {
    "default": {"worker", "scheduler"},
    "two": {"worker", "worker-2", "scheduler", "scheduler-2", "tokenizer-2", "router-2", "balancer"},
    "pd": {"worker-prefill", "worker-decode", "scheduler-prefill", "scheduler-decode"},
    "gpu": {"worker-gpu", "scheduler-gpu"},
    "observability": {"prometheus"},
    "setup": {"secrets"},
}
ALWAYS = {"redis", "kvstore", "tokenizer", "router"}


def as_compose_reads(text: str) -> str:
    """The text with the defaults of its variables."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text).replace("$$", "$")


@pytest.fixture(scope="module")
def stack() -> dict[str, Any]:
    return dict(yaml.safe_load(as_compose_reads(FILE.read_text())))


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """quire.yaml, with secrets that are there."""
    folder = tmp_path_factory.mktemp("settings")
    text = (FOLDER / "quire.yaml").read_text()
    for name in set(re.findall(r"/run/quire/(\S+)", text)):
        (folder / name).write_text("redis://user:password@redis:6379/0" if name in ("discovery", "redis") else "secret")
    (folder / "quire.yaml").write_text(text.replace("/run/quire", str(folder)))
    return folder / "quire.yaml"


def config_of(stack: dict[str, Any], settings: Path, service: str, name: str) -> Any:
    """The configuration that a container's service loads from the file, its environment and its command."""
    cls = getattr(importlib.import_module(f"quire_{service}.config"), f"{service.capitalize()}Config")
    made = stack["services"][name]
    assert made["environment"]["QUIRE_CONFIG"] == "/etc/quire.yaml"
    assert "./quire.yaml:/etc/quire.yaml:ro" in made["volumes"]
    environ = {key: str(value) for key, value in made["environment"].items() if key != "QUIRE_CONFIG"}
    config = load_config(cls, service, ["--config", str(settings), *made["command"]], environ)
    assert isinstance(config, ServiceConfig)
    return config


def test_fits_the_compose_specification(stack: dict[str, Any]) -> None:
    compose_spec = pytest.importorskip("compose_spec")
    parsed = compose_spec.PyCompose.from_yaml(yaml.safe_dump(stack))  # merge keys resolved
    parsed.validate()
    assert set(parsed.service_names()) == {*EVERY}


@pytest.mark.parametrize("profile", MEMBERS)
def test_a_profile_has_its_services_and_those_of_all(stack: dict[str, Any], profile: str) -> None:
    started = {name for name, made in stack["services"].items() if profile in made.get("profiles", [profile])}
    assert started == MEMBERS[profile] | ALWAYS


@pytest.mark.parametrize(("service", "name"), OURS)
def test_services_take_their_settings(stack: dict[str, Any], settings: Path, service: str, name: str) -> None:
    config = config_of(stack, settings, service, name)
    port = config.listen.rpartition(":")[2]
    assert config.listen == f"0.0.0.0:{port}" and config.advertise == f"{name}:{port}"
    assert config.instance == name, "two of one name would replace each other in discovery"
    assert config.tls_cert and config.tls_key and config.tls_ca and not config.insecure
    assert config.metrics_listen
    if service != "worker":
        assert config.discovery == "redis://user:password@redis:6379/0"
    if service in ("worker", "kvstore"):
        assert config.page_mac_key == "secret"
    if service == "router":
        assert config.api_key_file and config.ssl_certfile and config.redis


@pytest.mark.parametrize(("service", "name"), OURS)
def test_replicas_differ_only_in_what_they_are_called_and_in_their_part(
    stack: dict[str, Any], settings: Path, service: str, name: str
) -> None:
    first = config_of(stack, settings, service, REPLICAS[service][0])
    config = config_of(stack, settings, service, name)
    of_its_own = {"advertise", "instance", "worker", "role", "peer_hosts", "device"}
    kept = {each.name: getattr(first, each.name) for each in dataclasses.fields(first) if each.name in of_its_own}
    assert dataclasses.replace(config, **kept) == first
    if service == "scheduler":
        assert config.worker == f"{name.replace('scheduler', 'worker')}:50053"
        assert config.role == (name.partition("-")[2] if name.endswith(("prefill", "decode")) else "both")


def test_workers_that_pull_pages_know_each_other(stack: dict[str, Any], settings: Path) -> None:
    prefill = config_of(stack, settings, "worker", "worker-prefill")
    decode = config_of(stack, settings, "worker", "worker-decode")
    assert (prefill.peer_hosts, decode.peer_hosts) == (("worker-decode",), ("worker-prefill",))


@pytest.mark.parametrize("name", EVERY)
def test_containers_are_hardened_and_limited(stack: dict[str, Any], name: str) -> None:
    service = stack["services"][name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert "no-new-privileges:true" in service["security_opt"]
    assert not service["user"].startswith("0")
    assert service["mem_limit"] and service["pids_limit"]
    assert service["logging"]["options"] == {"max-size": "10m", "max-file": "3"}
    assert ("ports" in service) == (name in PUBLISHED)
    assert all(port.startswith("127.0.0.1:") for port in service.get("ports", ()))
    assert ("edge" in service["networks"]) == (name in PUBLISHED)


def test_only_a_services_own_secrets_are_mounted(stack: dict[str, Any]) -> None:
    for service, name in OURS:
        (secrets,) = [volume for volume in stack["services"][name]["volumes"] if ":/run/quire:" in volume]
        assert secrets == f"{service}-secrets:/run/quire:ro"
    made_for = {volume.partition(":")[0] for volume in stack["services"]["secrets"]["volumes"]}
    assert made_for >= {name for name in stack["volumes"] if name.endswith("-secrets")}
    assert sum("authority:" in str(made.get("volumes")) for made in stack["services"].values()) == 1


@pytest.mark.parametrize(("service", "name"), OURS)
def test_compose_waits_for_readiness_and_images_report_liveness(
    stack: dict[str, Any], settings: Path, service: str, name: str
) -> None:
    """A check that waits for a service wants it ready. No restart of unhealthy containers ends a worker that loads."""
    made, config = stack["services"][name], config_of(stack, settings, service, name)
    port = config.listen.rpartition(":")[2]
    assert made["healthcheck"]["test"] == [
        *("CMD", "python", "-m", "quire_common.healthcheck", f"127.0.0.1:{port}", READINESS)
    ]
    environ = {key: str(value) for key, value in made["environment"].items() if "HEALTHCHECK" in key}
    probe = load_config(HealthcheckConfig, "healthcheck", ["--config", str(settings)], environ)
    assert probe.tls_ca.endswith("public-ca.pem" if service == "router" else "/ca.pem")
    assert probe.server_name == "localhost" if service == "router" else probe.service == service


def test_only_the_edge_has_a_way_out(stack: dict[str, Any]) -> None:
    assert stack["networks"]["engine"]["internal"] is True


def test_prometheus_scrapes_every_service(stack: dict[str, Any], settings: Path) -> None:
    scraped = yaml.safe_load((FOLDER / "prometheus.yml").read_text())["scrape_configs"]
    names = {each["job_name"].removeprefix("quire-"): each["dns_sd_configs"][0] for each in scraped}
    assert {job: tuple(found["names"]) for job, found in names.items()} == REPLICAS
    for service, name in OURS:
        config = config_of(stack, settings, service, name)
        assert config.metrics_listen == f"0.0.0.0:{names[service]['port']}"
    for job in scraped:
        name, server = job["job_name"].removeprefix("quire-"), job["tls_config"]["server_name"]
        assert server == ("localhost" if name == "router" else f"{name}.quire.internal")


def test_jobs_are_called_as_the_alerts_say() -> None:
    jobs = [
        [
            each["job_name"]
            for each in yaml.safe_load((ROOT / "deploy" / folder / "prometheus.yml").read_text())["scrape_configs"]
        ]
        for folder in ("compose", "observability")
    ]
    assert jobs[0] == jobs[1]


def test_the_balancer_knows_every_router() -> None:
    text = (FOLDER / "haproxy.cfg").read_text()
    assert re.findall(r"^ +server (\S+) (\S+)$", text, re.MULTILINE) == [
        (name, f"{name}:8000") for name in REPLICAS["router"]
    ]


def test_the_balancer_keeps_a_busy_router_and_leaves_a_draining_one() -> None:
    """A check that takes long is no sign of a router that is gone; one that is refused twice is."""
    text = (FOLDER / "haproxy.cfg").read_text()
    (patience,) = re.findall(r"^ +timeout check (\d+)s$", text, re.MULTILINE)
    ((interval_ms, fall),) = re.findall(r" inter (\d+)ms fall (\d+) ", text)
    assert int(patience) >= 2 and int(fall) >= 2
    delay_s = yaml.safe_load((FOLDER / "quire.yaml").read_text())["router"]["drain_delay_s"]
    assert int(fall) * int(interval_ms) / 1000 <= delay_s / 2


def test_services_start_in_any_order(stack: dict[str, Any]) -> None:
    """podman starts no container again, also after a crash, while one that it depends on does not run."""
    assert not any("depends_on" in made for made in stack["services"].values())
