"""Stops a stack from outside, by what its state file says. Touches only processes proven to be the stack's own."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass

from quire.local.pids import ProcessId, marked
from quire.local.state import StackState

# Beyond the time to drain: the supervisor's own, and then the kernel's.
_MARGIN_S = 10.0
_KILL_S = 10.0


@dataclass(frozen=True)
class StopReport:
    """What it took. `left` is empty unless the kernel holds a process fast."""

    seconds: float
    killed: tuple[int, ...]
    left: tuple[int, ...]


def stop_stack(state: StackState, limit_s: float) -> StopReport:
    """Stop the stack by SIGTERM to its supervisor, who drains and stops the services; at the limit, by SIGKILL to all
    of the stack. Returns what that took."""
    began = time.monotonic()
    supervisor = state.supervisor
    if supervisor.signal(signal.SIGTERM) and not supervisor.wait(limit_s):
        supervisor.signal(signal.SIGTERM)  # the second one: do not drain
        supervisor.wait(_MARGIN_S)
    rest = _remaining(state)
    for process in rest:
        process.signal(signal.SIGKILL)
    deadline = time.monotonic() + _KILL_S
    left = [process for process in rest if not process.wait(deadline - time.monotonic())]
    return StopReport(time.monotonic() - began, tuple(p.pid for p in rest), tuple(p.pid for p in left))


def _remaining(state: StackState) -> list[ProcessId]:
    known = [state.supervisor, *(service.process for service in state.services.values())]
    return list({process: None for process in [*known, *marked(state.stack_id)] if process.alive()})
