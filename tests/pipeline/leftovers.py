"""What must be true when a stack has ended, found without the package's own code."""

from __future__ import annotations

import time

import psutil

from quire.local.pids import MARK_VARIABLE
from quire.local.state import StackState, StateDirectory

LIMIT_S = 60.0


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
    deadline = time.monotonic() + LIMIT_S
    while left := _ports_left(state):  # a test beside this one may have been given one of them, and returns it
        assert time.monotonic() < deadline, f"still listened on: {left}"
        time.sleep(0.1)


def _ports_left(state: StackState) -> set[int]:
    """But for those that another stack has by now."""
    owned, listening = ports_of(state), psutil.net_connections("tcp")
    holders = {c.laddr.port: c.pid for c in listening if c.status == psutil.CONN_LISTEN and c.laddr.port in owned}
    return {port for port, pid in holders.items() if _mark(pid) in ("", state.stack_id)}


def _mark(pid: int | None) -> str:
    """Of which stack a process is; empty: of none."""
    try:
        return "" if pid is None else psutil.Process(pid).environ().get(MARK_VARIABLE, "")
    except psutil.Error:
        return ""
