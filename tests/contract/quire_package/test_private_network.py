"""Private networks: addresses that reach each other and this process, and nothing that stays."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.errors import FailedPrecondition
from quire.local import private_network
from quire.local.private_network import PrivateNetwork

LIMIT_S = 20.0
# Listens at its address, or connects to that of another; says what it heard.
LISTEN = (
    "import socket, sys; server = socket.create_server((sys.argv[1], 7000)); print('up', flush=True); "
    "server.accept()[0].send(b'hi')"
)
CONNECT = "import socket, sys; print(socket.create_connection((sys.argv[1], 7000), 5).recv(2).decode())"
# Holds a network until it is killed.
HOLD = (
    "from quire.local.private_network import PrivateNetwork; n = PrivateNetwork(['a']); import sys, subprocess; "
    "subprocess.Popen([*n.prefix('a'), sys.executable, '-c', 'pass']).wait(); print('up', flush=True); sys.stdin.read()"
)


def interfaces() -> set[str]:
    return {path.name for path in Path("/sys/class/net").iterdir()}


@pytest.fixture
def network() -> Iterator[PrivateNetwork]:
    before = interfaces()
    try:
        made = PrivateNetwork(["a", "b"])
    except FailedPrecondition as error:
        pytest.skip(error.message)
    with made:
        yield made
    assert interfaces() == before


def connect(network: PrivateNetwork, host: str, name: str = "") -> str:
    prefix = network.prefix(name) if name else ()
    command = [*prefix, sys.executable, "-c", CONNECT, host]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=LIMIT_S, check=True).stdout.strip()


@pytest.mark.parametrize("caller", ["", "b"])
def test_members_reach_each_other_and_are_reached(network: PrivateNetwork, caller: str) -> None:
    command = [*network.prefix("a"), sys.executable, "-c", LISTEN, network.hosts["a"]]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None and server.stdout.readline() == "up\n"
        assert connect(network, network.hosts["a"], caller) == "hi"
        assert server.wait(LIMIT_S) == 0


def test_each_has_its_own_ports(network: PrivateNetwork) -> None:
    for name in ("a", "b"):
        command = [*network.prefix(name), sys.executable, "-c", LISTEN, network.hosts[name]]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
            assert server.stdout is not None and server.stdout.readline() == "up\n"
            server.kill()


def test_nothing_stays_of_a_holder_that_is_killed(network: PrivateNetwork) -> None:
    before = interfaces()
    with subprocess.Popen([sys.executable, "-c", HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == b"up\n"
        assert len(interfaces() - before) == 1
        os.kill(holder.pid, signal.SIGKILL)
        holder.wait(LIMIT_S)
    deadline = time.monotonic() + LIMIT_S
    while interfaces() != before:  # the kernel clears up behind the scenes
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_two_at_once_do_not_meet(network: PrivateNetwork) -> None:
    with PrivateNetwork(["a"]) as other:
        assert not set(other.hosts.values()) & set(network.hosts.values())


def test_no_descriptor_stays_where_a_later_namespace_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def make() -> int:
        if len(made) == 2:
            raise FailedPrecondition("NO_NAMESPACES", "A network namespace was refused.", "Wait.")
        made.append(os.open(os.devnull, os.O_RDONLY))
        return made[-1]

    monkeypatch.setattr(private_network, "_find", lambda tool: "true")
    monkeypatch.setattr(private_network, "_new_namespace", make)
    with pytest.raises(FailedPrecondition, match="refused"):
        PrivateNetwork(["a", "b"])
    for descriptor in made:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)


def test_a_namespace_without_a_descriptor_is_refused_with_the_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_files(*_: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(private_network, "_CLONE_NEWNET", 0)  # makes no namespace, and needs no privilege
    monkeypatch.setattr(private_network, "_find", lambda tool: tool)
    with monkeypatch.context() as patched:
        patched.setattr(os, "open", no_files)
        with pytest.raises(FailedPrecondition, match="refused: Too many open files") as raised:
            PrivateNetwork(["a"])
    assert raised.value.code == "NO_NAMESPACES"


def test_who_may_not_is_told_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(private_network, "_CLONE_NEWNET", -1)  # the kernel knows no such flags
    with pytest.raises(FailedPrecondition, match="NO_NAMESPACES") as raised:
        PrivateNetwork(["a"])
    assert "--no-netns" in raised.value.fix
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    with pytest.raises(FailedPrecondition, match="need 'ip', a program"):
        PrivateNetwork(["a"])
