"""The local supervisor over fake services: real processes, real ports, nothing of a model."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from quire.errors import FailedPrecondition, StartFailed
from quire.local import events
from quire.local.pids import ProcessId
from quire.local.ports import free_ports
from quire.local.roster import NICENESS
from quire.local.spec import SERVICES
from quire.local.stack import LocalStack
from quire.local.state import StateDirectory
from quire.local.stop import stop_stack
from tests.pipeline.leftovers import assert_nothing_left, listening_ports, ports_of, processes_of, read_state
from tests.pipeline.stack.stacks import fake_spec

LIMIT_S = 60.0


def wait_gone(processes: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(processes, timeout=LIMIT_S)
    assert alive == []


def test_supervisor_starts_five_services_and_leaves_nothing() -> None:
    seen: list[events.Event] = []
    stack = LocalStack(fake_spec(switches={"worker": ("--ready-after-s", "1")}), seen.append)
    state = read_state()
    assert state.phase == "ready"
    assert set(state.services) == set(SERVICES)
    assert len(processes_of(state.stack_id)) == len(SERVICES)
    assert ports_of(state) <= listening_ports()
    nice = {name: psutil.Process(service.pid).nice() for name, service in state.services.items()}
    own = psutil.Process().nice()
    assert nice == {name: min(own + (0 if name == "worker" else NICENESS), 19) for name in SERVICES}
    stack.close()
    assert_nothing_left(state)
    assert read_state().phase == "stopped"
    ready = {e.service for e in seen if isinstance(e, events.Progress) and e.phase == "ready"}
    assert ready == set(SERVICES)
    shares = [e.progress for e in seen if isinstance(e, events.Progress) and e.phase == "weights"]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_services_get_peer_addresses_and_keys_stay_off_command_lines(tmp_path: Path) -> None:
    import json

    switches = {service: ("--dump", str(tmp_path / service)) for service in SERVICES}
    stack = LocalStack(fake_spec(switches=switches, api_keys=("secret-1", "secret-2")))
    services = read_state().services
    stack.close()
    dumps = {service: json.loads((tmp_path / service).read_text()) for service in SERVICES}
    address = {name: f"127.0.0.1:{service.port}" for name, service in services.items()}
    assert f"--worker={address['worker']}" in dumps["scheduler"]["argv"]
    assert f"--kvstore={address['kvstore']}" in dumps["worker"]["argv"]
    assert f"--schedulers={address['scheduler']}" in dumps["router"]["argv"]
    assert f"--tokenizers={address['tokenizer']}" in dumps["router"]["argv"]
    assert dumps["router"]["environ"]["QUIRE_ROUTER_API_KEY"] == "secret-1,secret-2"
    assert "QUIRE_ROUTER_API_KEY" not in dumps["worker"]["environ"]
    assert not [name for name in dumps if "secret" in str(dumps[name]["argv"])]


def test_failed_start_shows_the_services_typed_error() -> None:
    with pytest.raises(StartFailed) as raised:
        LocalStack(fake_spec(switches={"tokenizer": ("--fail", "NO_SUCH_MODEL")}))
    error = raised.value
    assert (error.service, error.code) == ("tokenizer", "NO_SUCH_MODEL")
    assert error.message == "the cause of NO_SUCH_MODEL"
    assert error.fix == "the fix of NO_SUCH_MODEL"
    assert Path(error.log).is_file()
    assert_nothing_left(read_state())
    assert read_state().phase == "failed"


def test_failed_start_blames_the_service_that_others_need(tmp_path: Path) -> None:
    failing = ("router", "scheduler", "worker")
    beside = f"{tmp_path}:{len(failing)}"
    switches = {service: ("--fail", f"NO_{service.upper()}", "--fail-beside", beside) for service in failing}
    with pytest.raises(StartFailed) as raised:
        LocalStack(fake_spec(switches=switches))
    assert raised.value.code == "NO_WORKER"


def test_failed_start_shows_the_exception_of_a_crash() -> None:
    with pytest.raises(StartFailed) as raised:
        LocalStack(fake_spec(switches={"kvstore": ("--crash",)}))
    assert raised.value.code == "CRASHED"
    assert raised.value.message == "RuntimeError: the last words"


@pytest.mark.deep
def test_service_that_never_gets_ready_is_named() -> None:
    seen: list[events.Event] = []
    with pytest.raises(StartFailed) as raised:
        LocalStack(fake_spec(switches={"scheduler": ("--never-ready",)}, start_timeout_s=5.0), seen.append)
    # On a machine that is busy others may be late too: the first of them that the rest depends on is named.
    ready = {event.service for event in seen if isinstance(event, events.Progress) and event.phase == "ready"}
    late = [service for service in SERVICES if service not in ready]
    assert "scheduler" in late
    assert (raised.value.service, raised.value.code) == (late[0], "START_TIMEOUT")
    assert_nothing_left(read_state())


@pytest.mark.deep
def test_taken_port_is_replaced_by_another(tmp_path: Path) -> None:
    stack = LocalStack(fake_spec(switches={"scheduler": ("--fail-once", str(tmp_path / "flag"))}))
    assert (tmp_path / "flag").exists()
    assert read_state().phase == "ready"
    stack.close()
    assert_nothing_left(read_state())


@pytest.mark.deep
def test_port_that_stays_taken_is_an_error() -> None:
    with pytest.raises(StartFailed) as raised:
        LocalStack(fake_spec(switches={"scheduler": ("--fail", "PORT_IN_USE")}))
    assert raised.value.code == "PORT_IN_USE"


def test_users_taken_port_is_refused_before_the_start() -> None:
    import socket

    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        with pytest.raises(StartFailed) as raised:
            LocalStack(fake_spec(port=port))
    assert raised.value.code == "PORT_IN_USE"
    assert str(port) in raised.value.message
    assert read_state().services == {}


@pytest.mark.deep
def test_a_service_that_ignores_sigterm_is_killed_after_its_time_to_drain() -> None:
    stopped: list[events.Stopped] = []
    stack = LocalStack(
        fake_spec(switches={"worker": ("--ignore-sigterm",)}, drain_timeout_s=1.0),
        lambda event: stopped.append(event) if isinstance(event, events.Stopped) else None,
    )
    state = read_state()
    stack.close()
    assert stack.ended.wait(LIMIT_S)
    assert "worker" in stopped[0].killed  # a busy machine may not have ended others in that time
    assert_nothing_left(state)


@pytest.mark.deep
def test_grandchildren_are_ended_too() -> None:
    stack = LocalStack(fake_spec(switches={"tokenizer": ("--grandchild",)}))
    state = read_state()
    assert len(processes_of(state.stack_id)) == len(SERVICES) + 1
    stack.close()
    assert_nothing_left(state)


@pytest.mark.deep
def test_services_die_with_a_supervisor_that_is_killed() -> None:
    stack = LocalStack(fake_spec(switches={"worker": ("--ignore-sigterm",)}))
    state = read_state()
    children = processes_of(state.stack_id)
    os.kill(stack.supervisor_pid, signal.SIGKILL)
    wait_gone(children)
    stack.close()
    assert_nothing_left(state)


@pytest.mark.deep
def test_next_supervisor_removes_what_a_killed_one_left() -> None:
    stack = LocalStack(fake_spec(switches={"tokenizer": ("--grandchild",)}))
    before = read_state()
    os.kill(stack.supervisor_pid, signal.SIGKILL)
    stack.close()
    assert len(processes_of(before.stack_id)) >= 1  # the child of a child; the kernel may still end the others
    stack = LocalStack(fake_spec())
    assert processes_of(before.stack_id) == []
    stack.close()


@pytest.mark.deep
def test_interrupted_start_leaves_nothing() -> None:
    spec = fake_spec(owned=False, switches={"scheduler": ("--never-ready",)})

    def interrupt(event: events.Event) -> None:
        if isinstance(event, events.Progress) and event.phase == "ready":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        LocalStack(spec, interrupt)
    assert_nothing_left(read_state())


@pytest.mark.deep
def test_owned_stack_ends_with_its_killed_owner(tmp_path: Path) -> None:
    spec = tmp_path / "spec.json"
    spec.write_text(fake_spec().to_json())
    program = (
        "import sys, time\n"
        "from quire.local.spec import StackSpec\n"
        "from quire.local.stack import LocalStack\n"
        f"stack = LocalStack(StackSpec.from_json(open({str(spec)!r}).read()))\n"
        "print('ready', flush=True)\n"
        "time.sleep(3600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline() == b"ready\n"
        state = read_state()
        everything = [*processes_of(state.stack_id), psutil.Process(state.supervisor.pid)]
        owner.kill()
    wait_gone(everything)
    assert_nothing_left(state)


@pytest.mark.deep
def test_a_second_stack_of_the_same_name_is_refused() -> None:
    stack = LocalStack(fake_spec())
    with pytest.raises(StartFailed) as raised:
        LocalStack(fake_spec())
    assert raised.value.code == "ALREADY_RUNNING"
    assert read_state().phase == "ready"
    stack.close()
    with StateDirectory("test").hold_lock(), pytest.raises(FailedPrecondition), StateDirectory("test").hold_lock():
        pass


@pytest.mark.deep
def test_a_detached_stack_outlives_its_starter_and_is_stopped_by_its_state_file() -> None:
    spec = fake_spec(owned=False, switches={"tokenizer": ("--grandchild",)})
    program = (
        "import sys\n"
        "from quire.local.spec import StackSpec\n"
        "from quire.local.stack import LocalStack\n"
        "LocalStack(StackSpec.from_json(sys.stdin.readline()))\n"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", program], input=spec.to_json(), text=True, check=True)
    state = StateDirectory("test").running()
    assert state is not None
    assert len(processes_of(state.stack_id)) == len(SERVICES) + 1
    report = stop_stack(state, LIMIT_S)
    assert report.killed == ()
    assert report.left == ()
    assert_nothing_left(state)


@pytest.mark.deep
def test_stale_state_file_kills_no_reused_pid() -> None:
    """The pids are of a live innocent process, the start times are not."""
    innocent = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"])
    try:
        stack = LocalStack(fake_spec())
        state = read_state()
        stack.close()
        not_innocents = ProcessId.of(innocent.pid).start_time + 1
        state.supervisor = ProcessId(innocent.pid, not_innocents)
        for service in state.services.values():
            service.pid, service.start_time = innocent.pid, not_innocents
        stop_stack(state, 1.0)
        assert innocent.poll() is None
    finally:
        innocent.kill()
        innocent.wait()


def test_free_ports_are_distinct() -> None:
    assert len(set(free_ports(50))) == 50
