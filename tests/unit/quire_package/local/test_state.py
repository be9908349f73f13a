from __future__ import annotations

import errno
import os
import signal
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from quire.errors import FailedPrecondition, InvalidArgument, StartFailed
from quire.local import events
from quire.local.pids import ProcessId
from quire.local.ports import HeldPorts, free_ports, is_free
from quire.local.roster import Roster
from quire.local.spec import SERVICES, StackSpec, replica_of
from quire.local.state import ServiceState, StackState, StateDirectory, list_names

SERVICES_LIST = '{"supervisor": {"pid": 1, "start_time": 1}, "services": []}'


def test_a_state_survives_its_file(tmp_path: Path) -> None:
    directory = StateDirectory("one", tmp_path)
    directory.create()
    state = StackState("one", "id", "model", ProcessId.of(os.getpid()))
    state.services["router"] = ServiceState(1, 2, 3, "ready", "x", 4)
    directory.write(state)
    assert directory.read() == state
    assert directory.running() == state
    assert list_names(tmp_path) == ["one"]
    assert directory.path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("text", ["", "{", "[]", '{"name": "x"}', "\x00", SERVICES_LIST], ids=repr)
def test_a_state_file_that_is_none(tmp_path: Path, text: str) -> None:
    directory = StateDirectory("one", tmp_path)
    directory.create()
    directory.state_file.write_text(text)
    assert directory.read() is None


@pytest.mark.parametrize("name", ["", "../up", "a/b", ".hidden", "x" * 65])
def test_a_name_that_would_leave_the_directory(name: str) -> None:
    with pytest.raises(InvalidArgument):
        StateDirectory(name)


def test_the_base_directory_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUIRE_STATE_DIR", str(tmp_path / "a"))
    assert StateDirectory("n").path == tmp_path / "a" / "n"
    monkeypatch.delenv("QUIRE_STATE_DIR")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "b"))
    assert StateDirectory("n").path == tmp_path / "b" / "quire" / "n"


def test_a_process_is_its_pid_and_its_start() -> None:
    me = ProcessId.of(os.getpid())
    assert me.alive()
    assert me.start_time > 0
    impostor = ProcessId(me.pid, me.start_time + 1)
    assert not impostor.alive()
    assert not impostor.signal(signal.SIGKILL)  # this test would not live to say so
    assert impostor.wait(0)


@pytest.mark.parametrize("code", [errno.ENOSYS, errno.EPERM])
def test_a_kernel_without_process_descriptors(code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(pid: int) -> int:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(os, "pidfd_open", refuse)
    me = ProcessId.of(os.getpid())
    assert not me.wait(0.01)
    assert me.signal(signal.SIGCONT)
    impostor = ProcessId(me.pid, me.start_time + 1)
    assert impostor.wait(30) and not impostor.signal(signal.SIGKILL)


def test_a_bound_port_is_not_free() -> None:
    (port,) = free_ports(1)
    assert is_free("127.0.0.1", port)
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", port))
        holder.listen()
        assert not is_free("127.0.0.1", port)


@pytest.mark.parametrize(
    "event",
    [
        events.Progress("worker", "weights", 1.0, 0.5, "x"),
        events.Ready("http://a", "b", 2.0),
        events.Failed("router", "C", "m", "f", "l"),
        events.Died("router", "C", "m", "f", "l", 0.5),
        events.Restarted("worker-2", 3),
        events.Stopped(1.0, ("worker",)),
    ],
    ids=lambda event: type(event).__name__,
)
def test_events_survive_their_line(event: events.Event) -> None:
    line = events.encode(event)
    assert "\n" not in line
    assert events.decode(line) == event


@pytest.mark.parametrize("line", ["", "x", "[]", "{}", '{"event": "other"}', "3"])
def test_a_line_that_is_no_event(line: str) -> None:
    assert events.decode(line) is None


def test_a_spec_survives_its_line() -> None:
    spec = StackSpec("n", "m", api_keys=("k",), commands={"worker": ("a", "b")}, flags={"worker": {"x": "y"}})
    assert StackSpec.from_json(spec.to_json()) == spec


def test_user_flags_come_last_and_win() -> None:
    spec = StackSpec("n", "/m", host="0.0.0.0", flags={"worker": {"model": "/other", "dtype": "float32"}})
    ports = {name: 1000 + i for i, name in enumerate((*SERVICES, "http"))}
    worker, router = spec.command("worker", ports), spec.command("router", ports)
    assert worker[:3] == [sys.executable, "-m", "quire_worker"]
    assert "--model=/other" in worker
    assert "--model=/m" not in worker
    assert "--dtype=float32" in worker
    assert f"--listen=127.0.0.1:{ports['worker']}" in worker
    assert f"--listen=0.0.0.0:{ports['router']}" in router
    assert f"--port={ports['http']}" in router
    assert spec.reached_at("http") == "127.0.0.1"


def test_members_are_numbered_where_there_are_several() -> None:
    assert StackSpec("n", "m").members == SERVICES
    spec = StackSpec("n", "m", replicas=2, tokenizers=3)
    assert spec.members == (
        *("worker-1", "worker-2", "kvstore", "tokenizer-1", "tokenizer-2", "tokenizer-3"),
        *("scheduler-1", "scheduler-2", "router"),
    )
    assert replica_of("scheduler-2") == replica_of("worker-2") == ("scheduler-2", "worker-2")
    assert replica_of("worker") == ("scheduler", "worker")


def test_members_are_wired_in_pairs_and_the_router_to_all() -> None:
    flags = {"worker": {"dtype": "float32"}, "worker-2": {"dtype": "auto"}}
    spec = StackSpec("n", "/m", replicas=2, tokenizers=2, flags=flags)
    ports = {name: 1000 + i for i, name in enumerate((*spec.members, "http"))}
    router = spec.command("router", ports)
    for service in ("scheduler", "tokenizer"):
        names = [f"{service}-{number}" for number in (1, 2)]
        assert f"--{service}s=" + ",".join(f"{name}=127.0.0.1:{ports[name]}" for name in names) in router
    scheduler, worker = spec.command("scheduler-2", ports), spec.command("worker-2", ports)
    assert scheduler[2] == "quire_scheduler"
    assert f"--worker=127.0.0.1:{ports['worker-2']}" in scheduler
    assert "--instance=scheduler-2" in scheduler
    assert "--dtype=auto" in worker
    assert "--dtype=float32" in spec.command("worker-1", ports)


def test_a_stack_can_be_without_what_has_a_twin() -> None:
    one, two = StackSpec("n", "m"), StackSpec("n", "m", replicas=2, tokenizers=2)
    assert one.serves_without([])
    assert one.serves_without(["kvstore"])
    for name in ("router", "tokenizer", "scheduler", "worker"):
        assert not one.serves_without([name])
    assert two.serves_without(["worker-1", "scheduler-1", "tokenizer-2", "kvstore"])
    assert not two.serves_without(["worker-1", "scheduler-2"])
    assert not two.serves_without(["tokenizer-1", "tokenizer-2"])


def test_a_held_port_is_given_to_nobody_but_may_be_listened_on() -> None:
    held = HeldPorts()
    port = held.choose("127.0.0.1")
    with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
        stranger.bind(("127.0.0.1", port))  # it does not share addresses
    with socket.socket() as service:
        service.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        service.bind(("127.0.0.1", port))
        service.listen()
        other = HeldPorts()
        with pytest.raises(OSError, match="in use"):
            other.reserve("127.0.0.1", port)
        other.close()
    held.close()
    assert is_free("127.0.0.1", port)


def roster(tmp_path: Path, **ports: Any) -> Roster:
    return Roster(StackSpec("one", "model", **ports), StateDirectory("one", tmp_path), lambda event: None)


def test_one_port_cannot_be_chosen_twice(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    stack = roster(tmp_path, port=port, grpc_port=port)
    with pytest.raises(StartFailed, match="uses this port already") as error:
        stack.choose_ports()
    stack.close()
    assert error.value.code == "PORT_IN_USE" and f"port {port} " in error.value.message
    one = roster(tmp_path, port=port)
    one.choose_ports()
    one.choose_ports()  # The ports of the first call are released.
    one.close()


def test_the_users_ports_are_reserved_before_free_ones_are_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = list[int]()

    def choose(held: HeldPorts, host: str) -> int:
        calls.append(0)
        return 1

    def reserve(held: HeldPorts, host: str, port: int) -> bool:
        calls.append(port)
        return True

    monkeypatch.setattr(HeldPorts, "choose", choose)
    monkeypatch.setattr(HeldPorts, "reserve", reserve)
    roster(tmp_path, port=7001, grpc_port=7002).choose_ports()
    assert sorted(calls[:2]) == [7001, 7002] and set(calls[2:]) == {0}


@pytest.mark.parametrize("port", [0, 7001])
def test_host_that_is_not_this_machines_is_told_as_the_cause(tmp_path: Path, port: int) -> None:
    stack = roster(tmp_path, host="192.0.2.1", port=port)  # This address is reserved for documents.
    with pytest.raises(StartFailed, match=rf"192\.0\.2\.1: {os.strerror(errno.EADDRNOTAVAIL)}") as error:
        stack.choose_ports()
    stack.close()
    assert error.value.code == "BAD_VALUE" and "--host" in error.value.fix


def test_directory_that_cannot_be_made_is_a_typed_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(FailedPrecondition, match="QUIRE_STATE_DIR") as raised:
        StateDirectory("one", tmp_path / "file").create()
    assert raised.value.code == "STATE_DIRECTORY" and "Not a directory" in raised.value.message


@pytest.mark.parametrize(
    ("number", "fix"),
    [(errno.EACCES, "with --port a port that this user may take"), (errno.EMFILE, "Let this process open more files")],
)
def test_stack_says_port_in_use_only_if_it_is(
    number: int, fix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(HeldPorts, "reserve", refuse)
    stack = roster(tmp_path, port=80)
    with pytest.raises(StartFailed, match=os.strerror(number)) as error:
        stack.choose_ports()
    stack.close()
    assert error.value.code == "BAD_VALUE" and fix in error.value.fix


def test_first_failure_in_a_row_to_write_the_state_file_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    full = [True, True, False, True]

    def write(*_: object) -> None:
        if full.pop(0):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(StateDirectory, "write", write)
    stack = roster(tmp_path)
    logged = []
    for _ in range(4):
        stack._write()
        logged.append(os.strerror(errno.ENOSPC) in capsys.readouterr().err)
    assert logged == [True, False, False, True]
