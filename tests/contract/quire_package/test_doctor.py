"""Checks of the machine: each says what is wrong where something is."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import stat
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from redis import Redis

from quire.__main__ import main
from quire.doctor import software
from quire.doctor.machine import check_clock, check_disk
from quire.doctor.network import check_port, check_redis
from quire.doctor.software import check_gpu, check_grammars, check_model
from quire.models import find_model
from tests.redis_server import RedisServer, redis_server

__all__ = ["redis_server"]


def test_doctor_names_taken_ports() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        found = check_port("127.0.0.1", port)
        assert found.state == "warning" and str(port) in found.found and found.fix
    assert check_port("127.0.0.1", port).state == "ok"


def test_doctor_names_a_host_that_is_not_this_machines() -> None:
    found = check_port("192.0.2.1", 8000)  # This address is reserved for documents.
    assert found.state == "failed" and os.strerror(errno.EADDRNOTAVAIL) in found.found and "--host" in found.fix


@pytest.mark.parametrize("port", [-1, 65536, 10**20])
def test_doctor_refuses_numbers_that_are_no_ports(port: int) -> None:
    found = check_port("127.0.0.1", port)
    assert found.state == "failed" and str(port) in found.found and "65535" in found.fix


def test_doctor_checks_redis(redis_server: RedisServer) -> None:
    assert check_redis(f"127.0.0.1:{redis_server.port}").state in ("ok", "warning")
    assert check_redis(redis_server.url).found.split(",")[0].split(".")[0].isdigit()
    redis_server.stop()
    assert check_redis(f"127.0.0.1:{redis_server.port}").state == "failed"
    assert check_redis("nonsense").state == "failed"


def test_a_redis_with_a_password(redis_server: RedisServer) -> None:
    with Redis.from_url(redis_server.url) as client:
        client.config_set("requirepass", "p@ss word")
    place = f"127.0.0.1:{redis_server.port}"
    bare = check_redis(f"redis://{place}/0")
    assert bare.state == "warning" and "wants a password" in bare.found
    for credentials in (":p%40ss%20word", "default:p%40ss%20word"):
        assert check_redis(f"redis://{credentials}@{place}/0").state in ("ok", "warning")
        assert "ms away" in check_redis(f"redis://{credentials}@{place}/0").found
    wrong = check_redis(f"redis://:secret@{place}/0")
    assert wrong.state == "failed" and "WRONGPASS" in wrong.found
    gone = check_redis("redis://:secret@127.0.0.1:1/0")
    assert gone.state == "failed" and "127.0.0.1:1" in gone.found
    for found in (wrong, gone):
        assert "secret" not in found.found + found.fix
    assert check_redis("http://127.0.0.1").state == check_redis("127.0.0.1:port").state == "failed"


def test_a_redis_user_without_rights_is_told_so(redis_server: RedisServer) -> None:
    with Redis.from_url(redis_server.url) as client:
        client.acl_setuser("small", enabled=True, passwords=["+word"], commands=["+ping"])
    found = check_redis(f"redis://small:word@127.0.0.1:{redis_server.port}/0")
    assert found.state == "failed" and "NOPERM" in found.found


@pytest.mark.parametrize(
    ("packets", "state", "text"),
    [
        ([b"redis_version:", b"7.2.4\r\nos:Linux\r\n"], "ok", "7.2.4, "),
        ([b"redis_version:7", b".2.4\r", b"\n"], "ok", "7.2.4, "),
        ([b"redis_version:7rc", b"1\r\n"], "ok", "7rc1, "),
        ([b"redis_version:", b"5.0.1\r\n"], "failed", "is version 5.0.1"),
        ([b"valkey_version", b":8.1\r\n"], "failed", "is version unknown"),
    ],
)
def test_answer_of_a_redis_may_come_in_several_packets(packets: list[bytes], state: str, text: str) -> None:
    body = b"# Server\r\n" + b"".join(packets)
    checked = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor(1) as pool:

        def answer() -> None:
            connection, _ = server.accept()
            with connection:
                connection.recv(4096)
                for piece in (b"+PONG\r\n$%d\r\n# Server\r\n" % len(body), *packets, b"\r\n"):
                    with contextlib.suppress(ConnectionError):  # the check does not wait for the rest
                        connection.sendall(piece)
                    time.sleep(0.1)
                checked.wait(60)

        answered = pool.submit(answer)
        try:
            found = check_redis(f"127.0.0.1:{server.getsockname()[1]}")
        finally:
            checked.set()
        answered.result(60)
    assert found.state in (state, "warning" if state == "ok" else state) and text in found.found


@pytest.mark.parametrize(
    "address",
    ["redis://[::1", "[::1]:x", "127.0.0.1:99999", f"{'a' * 64}.example", "a..b:6379", "redis://user:12/pa@127.0.0.1"],
)
def test_redis_address_without_a_valid_host_and_port(address: str) -> None:
    found = check_redis(address)
    assert found.state == "failed" and "no valid host and port" in found.found and "host:port" in found.fix


def smi(folder: Path, text: str, code: int = 0) -> None:
    tool = folder / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\necho '{text}'\nexit {code}\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)


@pytest.mark.parametrize(
    ("says", "code", "needed", "state", "text"),
    [
        ("NVIDIA H200, 580.65.06, 143771, 4", 0, True, "ok", "1 x NVIDIA H200, driver 580.65.06, 143767 of 143771"),
        ("NVIDIA H200, 470.1, 143771, 4", 0, True, "warning", "driver 470.1"),
        ("NVIDIA H200, 580.1, 1000, 900", 0, True, "warning", "100 of 1000 MiB free"),
        ("NVIDIA GB10, 580.95.05, [N/A], [N/A]", 0, True, "ok", "1 x NVIDIA GB10, driver 580.95.05, memory unknown"),
        ("NVIDIA GB10, 470.1, [N/A], 4", 0, True, "warning", "driver 470.1, memory unknown"),
        ("no devices", 9, True, "failed", "nvidia-smi fails"),
        ("gibberish", 0, False, "warning", "nvidia-smi fails"),
    ],
)
def test_doctor_lists_gpus(
    says: str, code: int, needed: bool, state: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    smi(tmp_path, says, code)
    found = check_gpu(needed=needed)
    assert found.state == state and text in found.found


def test_doctor_accepts_a_machine_without_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert check_gpu(needed=False).state == "ok" and check_gpu(needed=True).state == "failed"


def test_doctor_checks_model_folders(tmp_path: Path) -> None:
    found = check_model(str(find_model(None)))
    assert found.state == "ok" and found.found.startswith("LlamaForCausalLM")
    lacking = check_model(str(tmp_path))
    assert lacking.state == "failed" and "config.json, tokenizer.json, *.safetensors" in lacking.found
    for name in ("config.json", "tokenizer.json", "a.safetensors"):
        (tmp_path / name).write_text("{}")
    for config in ("{}", '{"architectures": null}', '{"architectures": []}', "[]", "null", "{"):
        (tmp_path / "config.json").write_text(config)
        assert "no architecture" in check_model(str(tmp_path)).found


def test_doctor_compares_the_library_of_grammars_with_what_services_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software, "requires", lambda package: ["llguidance==1.0.0", "numpy>=2"])
    monkeypatch.setattr(software, "version", lambda package: "1.0.0")
    assert check_grammars().state == "ok" and "1.0.0" in check_grammars().found
    monkeypatch.setattr(software, "version", lambda package: "1.0.1")
    assert check_grammars().state == "failed" and "1.0.1" in check_grammars().found
    monkeypatch.undo()
    assert check_grammars().state == "ok"


def test_doctor_checks_disk_and_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_STATE_DIR", str(tmp_path / "not" / "yet"))
    assert str(tmp_path) in check_disk().found
    assert check_clock().found.startswith("steady")


def test_doctor_command_prints_all_checks(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert main(["doctor", "--json", "--port", port, "--redis", "127.0.0.1:1"]) == 1
    findings = {finding["name"]: finding for finding in json.loads(capsys.readouterr().out)}
    assert findings["redis"]["state"] == "failed" and findings["port"]["state"] == "warning"
    assert {"python", "services", "grammars", "gpu", "cores", "memory", "disk", "files", "clock"} < set(findings)
    main(["doctor"])
    assert "python" in capsys.readouterr().out
