"""Secrets of the compose stack: each service gets those that it needs, and no other service's."""

from __future__ import annotations

import importlib.util
import stat
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import redis
import yaml

from tests.redis_server import RedisServer
from tests.redis_server import redis_server as redis_server  # a fixture

ROOT = Path(__file__).resolve().parents[2]
TLS = {"tls.pem", "tls.key", "ca.pem"}
FILES = {
    "router": TLS | {"discovery", "redis", "keys.yaml", "public.pem", "public.key", "public-ca.pem"},
    "tokenizer": TLS | {"discovery"},
    "scheduler": TLS | {"discovery"},
    "worker": TLS | {"page_mac.key"},
    "kvstore": TLS | {"discovery", "page_mac.key"},
    "redis": {"users.acl", "probe"},
    "balancer": {"public-ca.pem"},
    "metrics": TLS | {"public-ca.pem", "api-key"},
}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_secrets", ROOT / "deploy" / "compose" / "make_secrets.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(script: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("secrets")
    for name in (*FILES, "authority"):
        (made / name).mkdir()
    script.make(made)
    return made


@pytest.mark.parametrize("name", FILES)
def test_a_service_gets_its_own_secrets_alone(folder: Path, name: str) -> None:
    assert {path.name for path in (folder / name).iterdir()} == FILES[name]
    for path in (folder / name).iterdir():
        # Prometheus runs as another user, and nobody else mounts its folder.
        assert stat.S_IMODE(path.stat().st_mode) == (0o644 if name == "metrics" else 0o600), path


def test_all_files_that_the_settings_name_are_made(folder: Path) -> None:
    settings = yaml.safe_load((ROOT / "deploy" / "compose" / "quire.yaml").read_text())
    for service in ("router", "tokenizer", "scheduler", "worker", "kvstore"):
        named = {str(value) for value in settings[service].values() if str(value).startswith("/run/quire/")}
        assert named and {Path(path).name for path in named} <= FILES[service]


def test_the_routers_key_file_has_no_key_in_it(folder: Path, script: ModuleType) -> None:
    text = (folder / "router" / "keys.yaml").read_text()
    entries = {entry["name"]: entry["scopes"] for entry in yaml.safe_load(text)["keys"]}
    assert entries == {"client": ["inference"], "prometheus": ["metrics"], "operator": ["admin", "metrics"]}
    assert not any(key in text for key in script.kept(folder).values())


def test_a_second_run_renews_certificates_and_keeps_the_rest(folder: Path, script: ModuleType) -> None:
    before = {path: path.read_text() for path in folder.rglob("*") if path.is_file()}
    script.make(folder)
    changed = {path.name for path, text in before.items() if path.read_text() != text}
    services = {
        f"{name}.{kind}" for name in (*script.SERVICES, "operator", "metrics", "public") for kind in ("pem", "key")
    }
    assert changed == services | {"tls.pem", "tls.key"}


@pytest.fixture
def users(folder: Path, redis_server: RedisServer) -> Iterator[RedisServer]:
    """A Redis that has the users of users.acl alone."""
    with redis.Redis.from_url(redis_server.url) as everybody:
        lines = (folder / "redis" / "users.acl").read_text().splitlines()
        for line in sorted(lines, key=lambda each: each.startswith("user default")):
            everybody.execute_command("ACL", "SETUSER", *line.split()[1:])
    yield redis_server


def as_user(url_file: Path, server: RedisServer) -> redis.Redis:
    return redis.Redis.from_url(url_file.read_text().replace("@redis:6379", f"@127.0.0.1:{server.port}"))


@pytest.mark.parametrize("name", ["router", "tokenizer", "scheduler", "kvstore"])
def test_a_user_of_redis_touches_only_the_keys_of_its_service(folder: Path, users: RedisServer, name: str) -> None:
    with as_user(folder / name / "discovery", users) as client:
        assert client.set(f"quire:endpoint:{name}:1", "x", px=1000)
        assert client.eval("return redis.call('get', KEYS[1])", 1, f"quire:endpoint:{name}:1") == b"x"
        for forbidden in (("FLUSHALL",), ("CONFIG", "GET", "*"), ("GET", "other"), ("KEYS", "*"), ("ACL", "LIST")):
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.execute_command(*forbidden)
        limits = ("SET", "quire:limit:{tenant}:tokens", "1", "PX", "1000")
        if name == "router":
            assert client.execute_command(*limits)
        else:
            with pytest.raises(redis.exceptions.NoPermissionError):
                client.execute_command(*limits)


def test_redis_lets_nobody_in_without_a_password(users: RedisServer) -> None:
    with redis.Redis.from_url(users.url) as stranger, pytest.raises(redis.exceptions.AuthenticationError):
        stranger.ping()
