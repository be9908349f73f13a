"""Stops a stack from another process, which finds the stack's processes in its state file. Signals only processes that
are proven to belong to the stack."""

from __future__ import annotations

import signal
import time
from dataclasses import dataclass

from quire.local.pids import ProcessId, marked
from quire.local.state import StackState

# Further time after the time limit for draining: for the supervisor to end, and for killed processes to end.
_MARGIN_S = 10.0
_KILL_S = 10.0


@dataclass(frozen=True)
class StopReport:
    """The result of a stop: its duration, and the pids of processes that were killed. `left` has the pids of processes
    that did not end even after SIGKILL."""

    seconds: float
    killed: tuple[int, ...]
    left: tuple[int, ...]


def stop_stack(state: StackState, limit_s: float) -> StopReport:
    """Stop a stack, and return a report. The stack's supervisor gets SIGTERM, drains and stops the services. If it
    still runs after `limit_s`, it gets a second SIGTERM, which ends the draining, and 10 s more. Then, or at once if
    the supervisor does not run, all processes of the stack that are left get SIGKILL, and 10 s to end. The report has
    the seconds, the pids that got SIGKILL, and those that are left."""
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
