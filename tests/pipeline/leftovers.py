"""What must be true when a stack has ended, found without the package's own code."""

from __future__ import annotations

import psutil

from quire.local.pids import MARK_VARIABLE
from quire.local.state import StackState, StateDirectory


def processes_of(stack_id: str) -> list[psutil.Process]:
    """Every process that carries the stack's mark."""
    return processes_with(MARK_VARIABLE, stack_id)


def processes_with(variable: str, value: str) -> list[psutil.Process]:
    """Every process that was started with this in its environment. Who is not there holds no port either."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(variable) == value and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def listening_ports() -> set[int]:
    return {c.laddr.port for c in psutil.net_connections("tcp") if c.status == psutil.CONN_LISTEN}


def ports_of(state: StackState) -> set[int]:
    return {service.port for service in state.services.values()} | {int(state.http.rpartition(":")[2])}


def read_state(name: str = "test") -> StackState:
    state = StateDirectory(name).read()
    assert state is not None
    return state


def assert_nothing_left(state: StackState) -> None:
    assert processes_of(state.stack_id) == []
    assert not state.supervisor.alive()
    assert not ports_of(state) & listening_ports()
