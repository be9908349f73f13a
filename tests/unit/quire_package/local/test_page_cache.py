"""Where a stack's pages are on disk, and that nobody's stay who will not come back."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from quire.engine_options import stack_flags
from quire.errors import InvalidArgument
from quire.local.page_cache import pages_folder, remove_abandoned, remove_own_pages
from quire.local.spec import SERVICES, StackSpec
from quire.local.state import StateDirectory

PORTS = dict.fromkeys((*SERVICES, "http"), 1)


@pytest.fixture(autouse=True)
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.delenv("QUIRE_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_a_stack_that_comes_again_finds_its_pages_in_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert pages_folder("a", lasting=True) == tmp_path / "cache" / "quire" / "pages" / "a"
    assert pages_folder("a", lasting=False) == tmp_path / "state" / "a" / "pages"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert pages_folder("a", lasting=True) == tmp_path / "home" / ".cache" / "quire" / "pages" / "a"
    monkeypatch.setenv("QUIRE_CACHE_DIR", str(tmp_path / "else"))
    assert pages_folder("a", lasting=True) == tmp_path / "else" / "pages" / "a"


def test_the_kvstore_is_told_unless_the_user_says_otherwise(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = StackSpec("a", "m").environment("kvstore")
    assert told["QUIRE_KVSTORE_DISK_PATH"] == str(tmp_path / "cache" / "quire" / "pages" / "a")
    assert int(told["QUIRE_KVSTORE_DISK_BYTES"]) == 8 << 30
    assert not any(name.startswith("QUIRE_KVSTORE") for name in StackSpec("a", "m").environment("worker"))
    monkeypatch.setenv("QUIRE_KVSTORE_DISK_PATH", "/elsewhere")
    assert StackSpec("a", "m").environment("kvstore")["QUIRE_KVSTORE_DISK_PATH"] == "/elsewhere"


def test_options_reach_the_kvstore_and_credentials_no_command_line() -> None:
    url = "redis://:secret@host/0"
    options = {"kv_offloading_size": 0.5, "kvstore_disk_bytes": 0, "kvstore_redis_url": url, "kvstore_timeout_ms": 70}
    spec = StackSpec("a", "m", flags=stack_flags(options))
    command = spec.command("kvstore", PORTS)
    assert f"--ram-bytes={1 << 29}" in command and "--disk-bytes=0" in command
    assert not any("secret" in part for part in command)
    assert spec.environment("kvstore")["QUIRE_KVSTORE_REDIS_URL"] == url
    assert "QUIRE_KVSTORE_REDIS_URL" not in spec.environment("router")
    assert "--kvstore-timeout-ms=70" in spec.command("scheduler", PORTS)
    with pytest.raises(InvalidArgument, match="kv-offloading-size is 'much'"):
        stack_flags({"kv_offloading_size": "much"})


def put_pages(name: str) -> Path:
    folder = pages_folder(name, lasting=False)
    folder.mkdir(parents=True)
    (folder / "a.page").write_bytes(os.urandom(10))
    return folder


def test_pages_of_a_stack_for_once_end_with_it() -> None:
    folder = put_pages("llm-1")
    directory = StateDirectory("llm-1")
    with directory.hold_lock():
        remove_own_pages(directory)
    assert not folder.exists() and directory.path.exists()


def test_pages_of_the_dead_go_and_those_of_the_living_stay() -> None:
    living, dead = put_pages("llm-1"), put_pages("llm-2")
    with StateDirectory("llm-1").hold_lock(), StateDirectory("llm-3").hold_lock():
        remove_abandoned()
        assert living.exists() and not dead.exists()
    remove_abandoned()
    assert not living.exists()
