"""StackSpec: members by name, and what each is told of the others."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest

from quire.doctor.machine import check_cores
from quire.errors import InvalidArgument
from quire.local import spec as spec_module
from quire.local.spec import SERVICES, StackSpec, replica_of, role_of, service_of, usable_cores
from quire_kvstore.config import KvstoreConfig
from quire_router.config import RouterConfig
from quire_scheduler.config import SchedulerConfig
from quire_scheduler.service.kv_events.events_config import parse_kv_events_config
from quire_tokenizer.config import TokenizerConfig
from quire_worker.config import WorkerConfig

CONFIGS = {
    "worker": WorkerConfig,
    "kvstore": KvstoreConfig,
    "tokenizer": TokenizerConfig,
    "scheduler": SchedulerConfig,
    "router": RouterConfig,
}


def options(spec: StackSpec, member: str) -> dict[str, str]:
    ports = {name: 7000 + number for number, name in enumerate((*spec.members, "http"))}
    flags = [word for word in spec.command(member, ports) if word.startswith("--")]
    words = (flag.removeprefix("--").partition("=") for flag in flags)
    return {name: value for name, _, value in words}


def test_replicas_with_roles_are_named_for_them() -> None:
    spec = StackSpec("test", "a-model", replicas=0, prefill=2, decode=1)
    assert spec.members_of("worker") == ("worker-prefill-1", "worker-prefill-2", "worker-decode-1")
    assert spec.members_of("scheduler") == ("scheduler-prefill-1", "scheduler-prefill-2", "scheduler-decode-1")
    assert replica_of("worker-prefill-2") == ("scheduler-prefill-2", "worker-prefill-2")
    assert [service_of(name) for name in spec.members[:3]] == ["worker"] * 3
    assert [role_of(name) for name in spec.members_of("worker")] == ["prefill", "prefill", "decode"]
    assert role_of("worker-2") == role_of("worker") == ""


def test_a_scheduler_is_told_its_role_and_its_own_worker() -> None:
    spec = StackSpec("test", "a-model", replicas=1, prefill=1, decode=1)
    assert spec.members_of("scheduler") == ("scheduler-1", "scheduler-prefill-1", "scheduler-decode-1")
    for member in spec.members_of("scheduler"):
        told = options(spec, member)
        assert told["instance"] == member
        assert told["worker"] == options(spec, replica_of(member)[1])["listen"]
        assert told.get("role", "") == role_of(member)


def test_without_roles_names_and_flags_are_as_ever() -> None:
    assert StackSpec("test", "a-model").members == ("worker", "kvstore", "tokenizer", "scheduler", "router")
    assert "role" not in options(StackSpec("test", "a-model"), "scheduler")


def test_any_whole_replica_is_enough_whatever_its_role() -> None:
    spec = StackSpec("test", "a-model", replicas=0, prefill=1, decode=1)
    assert spec.serves_without({"scheduler-decode-1"}) and spec.serves_without({"worker-prefill-1"})
    assert not spec.serves_without({"worker-prefill-1", "scheduler-decode-1"})


def test_members_listen_and_are_looked_for_at_their_own_addresses() -> None:
    hosts = {"router": "198.18.0.2", "scheduler": "198.18.0.3", "worker": "198.18.0.4"}
    spec = StackSpec("test", "a-model", hosts=hosts)
    router = options(spec, "router")
    assert router["host"] == "198.18.0.2" and router["listen"].startswith("198.18.0.2:")
    assert router["schedulers"] == options(spec, "scheduler")["listen"]
    assert options(spec, "scheduler")["worker"].startswith("198.18.0.4:")
    assert router["kvstores"].startswith("127.0.0.1:")
    assert "insecure" in router and "insecure" not in options(spec, "kvstore"), "a private network alone needs no TLS"
    assert spec.reached_at("http") == "198.18.0.2"
    assert StackSpec.from_json(spec.to_json()) == spec


def test_workers_of_a_network_may_pull_from_each_other_and_from_nobody_else() -> None:
    hosts = {"worker-prefill-1": "198.18.0.2", "worker-decode-1": "198.18.0.3", "router": "198.18.0.4"}
    spec = StackSpec("test", "a-model", replicas=0, prefill=1, decode=1, hosts=hosts)
    assert options(spec, "worker-decode-1")["peer-hosts"] == "198.18.0.2,198.18.0.3"
    near = StackSpec("test", "a-model", replicas=0, prefill=1, decode=1)
    assert "peer-hosts" not in options(near, "worker-decode-1")


@pytest.mark.parametrize(
    ("given", "first", "third"),
    [
        ({"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5657"}, ["*:5557", "*:5657"], ["*:5559", "*:5659"]),
        ({"enable_kv_cache_events": True}, [None, None], ["127.0.0.1:5559", None]),
        ({"endpoint": "tcp://10.0.0.1:5557"}, ["10.0.0.1:5557", None], ["10.0.0.1:5557", None]),
        ({"endpoint": "tcp://10.0.0.1:5557", "bind": True}, ["10.0.0.1:5557", None], ["10.0.0.1:5559", None]),
        ({"endpoint": "tcp://127.0.0.1:*"}, ["127.0.0.1:*", None], ["127.0.0.1:*", None]),
    ],
)
def test_each_replica_publishes_its_events_at_ports_of_its_own(
    given: dict[str, Any], first: list[str | None], third: list[str | None]
) -> None:
    spec = StackSpec("test", "a-model", replicas=3, flags={"scheduler": {"kv-events-config": json.dumps(given)}})
    for member, wanted in ("scheduler-1", first), ("scheduler-3", third):
        told = options(spec, member)["kv-events-config"]
        config, ours = json.loads(told), parse_kv_events_config(told)
        found = [config.get(name) for name in ("endpoint", "replay_endpoint")]
        assert found == [address and f"tcp://{address}" for address in wanted]
        assert ours.binds == parse_kv_events_config(json.dumps(given)).binds


def test_each_replica_publishes_its_events_at_a_socket_file_of_its_own() -> None:
    given = json.dumps({"endpoint": "ipc:///tmp/events", "replay_endpoint": "ipc:///tmp/replay"})
    spec = StackSpec("test", "a-model", replicas=2, flags={"scheduler": {"kv-events-config": given}})
    assert options(spec, "scheduler-1")["kv-events-config"] == given
    config = json.loads(options(spec, "scheduler-2")["kv-events-config"])
    assert config == {"endpoint": "ipc:///tmp/events_1", "replay_endpoint": "ipc:///tmp/replay_1", "bind": True}


def test_workers_share_the_cores_of_a_system_that_tells_no_affinity(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spec_module, "_ROOT", tmp_path)
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    assert options(StackSpec("test", "a-model", replicas=3), "worker-1")["torch-threads"] == "2"
    assert check_cores().found == "12 cores"


@pytest.mark.parametrize(
    ("group", "files", "cores"),
    [
        ("0::/", {"cpu.max": "400000 100000"}, 4),
        ("0::/", {"cpu.max": "max 100000"}, 12),
        ("0::/pod/box", {"pod/box/cpu.max": "max 100000", "pod/cpu.max": "650000 100000"}, 6),
        ("0::/of/the/host", {"cpu.max": "300000 100000"}, 3),
        ("0::/", {"cpu.max": "50000 100000"}, 1),
        ("3:cpu,cpuacct:/box", {"cpu/box/cpu.cfs_quota_us": "200000\n", "cpu/box/cpu.cfs_period_us": "100000\n"}, 2),
        ("3:cpu:/docker/12", {"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2),
        ("3:cpu:/box", {"cpu/box/cpu.cfs_quota_us": "-1\n", "cpu/box/cpu.cfs_period_us": "100000\n"}, 12),
        ("nonsense", {"cpu.max": "lots of it"}, 12),
    ],
)
def test_workers_share_the_cores_that_cpu_quotas_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: str, files: dict[str, str], cores: int
) -> None:
    tree = {
        "proc/self/cgroup": f"5:memory:/other\n{group}\n",
        **{f"sys/fs/cgroup/{name}": files[name] for name in files},
    }
    for name, text in tree.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(spec_module, "_ROOT", tmp_path)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(12), raising=False)
    assert usable_cores() == cores
    assert options(StackSpec("test", "a-model"), "worker")["torch-threads"] == str(max(1, cores // 2))


def test_what_a_scheduler_is_to_complain_of_reaches_it_as_it_is() -> None:
    for text in ("no JSON", "[]", '{"endpoint": 3}', "[" * 100_000):
        spec = StackSpec("test", "a-model", replicas=2, flags={"scheduler": {"kv-events-config": text}})
        assert options(spec, "scheduler-2")["kv-events-config"] == text


@pytest.mark.parametrize("service", SERVICES)
def test_only_what_a_service_declares_secret_is_in_its_environment_and_not_on_its_command_line(service: str) -> None:
    fields = {field.name.replace("_", "-"): field for field in dataclasses.fields(CONFIGS[service])}
    spec = StackSpec("test", "a-model", flags={service: {name: f"of {name}" for name in fields}})
    secret = {name for name, field in fields.items() if field.metadata["secret"]}
    assert fields.keys() - options(spec, service).keys() == secret
    told = {name: spec.environment(member) for name in SERVICES for member in spec.members_of(name)}
    for name in secret:
        variable = f"QUIRE_{service}_{name}".replace("-", "_").upper()
        assert {other for other in SERVICES if told[other].get(variable) == f"of {name}"} == {service}


def test_secret_of_one_member_and_keys_of_the_flag_win_and_a_flag_without_its_value_is_no_secret() -> None:
    flags: dict[str, dict[str, str | bool]] = {
        "worker": {"page-mac-key": "ab"},
        "worker-2": {"page-mac-key": "cd"},
        "kvstore": {"page-mac-key": True},
        "router": {"api-key": "k,l"},
    }
    spec = StackSpec("test", "a-model", replicas=2, api_keys=("m",), flags=flags)
    assert [spec.environment(name)["QUIRE_WORKER_PAGE_MAC_KEY"] for name in ("worker-1", "worker-2")] == ["ab", "cd"]
    assert spec.environment("router")["QUIRE_ROUTER_API_KEY"] == "k,l"
    assert "QUIRE_KVSTORE_PAGE_MAC_KEY" not in spec.environment("kvstore")
    assert "page-mac-key" in options(spec, "kvstore")


@pytest.mark.parametrize(("name", "port"), [("port", 70000), ("port", -1), ("grpc_port", 65536)])
def test_what_is_no_port_is_refused(name: str, port: int) -> None:
    with pytest.raises(InvalidArgument) as caught:
        StackSpec("one", "model", **{name: port})  # type: ignore[arg-type]  # fields by name
    assert (caught.value.code, caught.value.param) == ("BAD_VALUE", name)
