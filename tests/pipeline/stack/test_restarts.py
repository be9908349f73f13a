"""What a supervisor does when services of a stack that is ready end: fake services, real processes, real ports."""

from __future__ import annotations

import queue
import signal
from pathlib import Path
from typing import TypeVar

import pytest

from quire.errors import DeadlineExceeded, InvalidArgument
from quire.local import events
from quire.local.rolling import Rolling, rolling_turns, turns_of
from quire.local.spec import SERVICES
from quire.local.stack import LocalStack
from tests.pipeline.leftovers import assert_nothing_left, listening_ports, processes_of, read_state
from tests.pipeline.stack.stacks import fake_spec

LIMIT_S = 60.0
E = TypeVar("E", bound=events.Event)


class Watched:
    """A stack whose events can be waited for."""

    def __init__(self, **fields: object) -> None:
        self._events: queue.Queue[events.Event] = queue.Queue()
        self.stack = LocalStack(fake_spec(**fields), self._events.put)  # type: ignore[arg-type]  # the spec's own fields

    def wait(self, kind: type[E]) -> E:
        while True:
            event = self._events.get(timeout=LIMIT_S)
            if isinstance(event, kind):
                return event

    def kill(self, member: str) -> None:
        assert read_state().services[member].process.signal(signal.SIGKILL)

    def close(self) -> None:
        self.stack.close()
        assert_nothing_left(read_state())


def test_dead_service_is_restarted_on_its_port() -> None:
    watched = Watched()
    before = read_state().services["worker"]
    watched.kill("worker")
    died = watched.wait(events.Died)
    assert (died.service, died.code) == ("worker", "KILLED")
    assert 0 <= died.restart_in_s <= 0.1
    assert watched.wait(events.Restarted) == events.Restarted("worker", 1)
    after = read_state().services["worker"]
    assert (after.phase, after.restarts, after.port) == ("ready", 1, before.port)
    assert after.pid != before.pid
    assert after.port in listening_ports()
    assert watched.stack.directory.log("worker").read_text().count('"ready"') == 2
    watched.close()
    assert watched.stack.failure is None


def test_crash_of_a_service_names_its_cause(tmp_path: Path) -> None:
    word = tmp_path / "word"
    watched = Watched(switches={"kvstore": ("--die-once", str(word))})
    word.touch()
    died = watched.wait(events.Died)
    assert (died.service, died.code) == ("kvstore", "DIED_LATER")
    watched.wait(events.Restarted)
    watched.close()


def test_router_is_restarted_on_its_address() -> None:
    watched = Watched()
    before = watched.stack.ready
    watched.kill("router")
    watched.wait(events.Restarted)
    state = read_state()
    assert (state.http, state.grpc) == (before.http, before.grpc)
    assert int(state.http.rpartition(":")[2]) in listening_ports()
    watched.close()


def test_stack_goes_on_while_its_state_file_cannot_be_written() -> None:
    watched = Watched()
    stack_id = read_state().stack_id
    blocker = watched.stack.directory.state_file.with_suffix(".tmp")
    blocker.mkdir()  # nobody can write to a folder
    watched.kill("kvstore")
    assert watched.wait(events.Restarted) == events.Restarted("kvstore", 1)
    assert len(processes_of(stack_id)) == len(SERVICES)
    assert not watched.stack.ended.is_set()
    blocker.rmdir()
    watched.stack.close()
    assert read_state().phase == "stopped"
    assert_nothing_left(read_state())


@pytest.mark.deep
def test_service_that_cannot_restart_ends_the_stack_with_its_cause(tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    watched = Watched(switches={"worker": ("--fail-while", str(flag))})
    state = read_state()
    flag.touch()
    watched.kill("worker")
    assert watched.wait(events.Failed).code == "GONE"
    assert watched.stack.ended.wait(LIMIT_S)
    assert watched.stack.failure is not None
    assert (watched.stack.failure.service, watched.stack.failure.fix) == ("worker", "the fix of GONE")
    assert [death.restart_in_s < 0 for death in watched.stack.deaths][-2:] == [False, True]
    assert_nothing_left(state)
    assert read_state().phase == "failed"


@pytest.mark.deep
def test_service_that_hangs_while_it_restarts_is_started_again(tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    watched = Watched(switches={"kvstore": ("--hang-once", str(flag))}, start_timeout_s=8.0)
    flag.touch()
    watched.kill("kvstore")
    assert watched.wait(events.Died).code == "KILLED"
    late = watched.wait(events.Died)
    assert (late.service, late.code) == ("kvstore", "START_TIMEOUT")
    assert 0 < late.restart_in_s <= 0.2
    assert watched.wait(events.Restarted) == events.Restarted("kvstore", 2)
    watched.kill("kvstore")
    assert watched.wait(events.Died).code == "KILLED"
    watched.close()


@pytest.mark.deep
def test_stack_survives_on_a_replica_and_a_restart_tries_again(tmp_path: Path) -> None:
    flag = tmp_path / "flag"
    watched = Watched(switches={"worker-2": ("--fail-while", str(flag))}, replicas=2)
    flag.touch()
    watched.kill("worker-2")
    while watched.wait(events.Died).restart_in_s >= 0:
        pass
    assert read_state().services["worker-2"].phase == "failed"
    assert read_state().phase == "ready"
    flag.unlink()
    state = read_state()
    Rolling(watched.stack.directory, LIMIT_S).run(turns_of(state, ["worker-2"]))
    assert read_state().services["worker-2"].phase == "ready"
    watched.close()


@pytest.mark.deep
def test_stopping_a_stack_does_not_wait_for_restarts() -> None:
    watched = Watched(restart_delay_s=3600.0)
    state = read_state()
    watched.kill("tokenizer")
    watched.wait(events.Died)
    assert read_state().services["tokenizer"].phase == "exited"
    assert len(processes_of(state.stack_id)) == len(state.services) - 1
    watched.close()


@pytest.mark.deep
def test_rolling_restart_takes_replicas_then_tokenizers_in_turn() -> None:
    watched = Watched(replicas=2, tokenizers=2)
    before = read_state()
    told: list[str] = []
    Rolling(watched.stack.directory, LIMIT_S, told.append).run(rolling_turns(before))
    after = read_state()
    assert [line.partition(":")[0] for line in told] == [
        *("scheduler-1, worker-1", "scheduler-2, worker-2"),
        *("tokenizer-1", "tokenizer-2", "kvstore"),
    ]
    for name, service in after.services.items():
        assert (service.process == before.services[name].process) == (name == "router")
        assert service.phase == "ready"
        assert service.restarts == (name != "router")
    assert watched.stack.deaths == []  # an ordered end is no death
    watched.close()


@pytest.mark.deep
def test_replicas_with_roles_can_be_restarted_by_name() -> None:
    watched = Watched(replicas=0, prefill=1, decode=1)
    before = read_state()
    Rolling(watched.stack.directory, LIMIT_S).run(turns_of(before, ["worker-prefill-1"]))
    after = read_state()
    assert [name for name in after.services if after.services[name].restarts] == ["worker-prefill-1"]
    assert [turn.members for turn in rolling_turns(after)][:2] == [
        ("scheduler-prefill-1", "worker-prefill-1"),
        ("scheduler-decode-1", "worker-decode-1"),
    ]
    watched.close()


@pytest.mark.deep
def test_service_that_does_not_drain_in_time_is_killed() -> None:
    watched = Watched(switches={"tokenizer-1": ("--ignore-sigterm",)}, tokenizers=2, drain_timeout_s=1.0)
    told: list[str] = []
    with pytest.raises(InvalidArgument, match="There is no 'nobody'"):
        turns_of(read_state(), ["nobody"])
    try:
        Rolling(watched.stack.directory, 0.5, told.append).run(turns_of(read_state(), ["tokenizer"])[:1])
    except DeadlineExceeded:  # that is little for a new process
        watched.wait(events.Restarted)
    assert told[0] == "tokenizer-1: not drained after 0.5 s, killed"
    assert read_state().services["tokenizer-1"].phase == "ready"
    assert read_state().services["tokenizer-2"].restarts == 0
    watched.close()
