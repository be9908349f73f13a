"""Restarts members of a running stack in turn, from outside, by what its state file says.

Each is told to end (SIGTERM: it drains), its supervisor puts another in its place, and the next has its turn when that
one serves. Told to nobody else: where there are several, requests go on at the others.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from quire.errors import DeadlineExceeded, FailedPrecondition, InvalidArgument
from quire.local.spec import replica_of, service_of
from quire.local.state import ServiceState, StackState, StateDirectory

_POLL_S = 0.05
# After SIGKILL, before it is the kernel that holds the process.
_KILL_S = 10.0


@dataclass(frozen=True)
class Turn:
    """Members that are restarted together; the callers among them end first."""

    members: tuple[str, ...]


def rolling_turns(state: StackState) -> list[Turn]:
    """Return a turn for every replica and every tokenizer, then the kvstore. Not the router: it holds the clients'
    connections."""
    schedulers = [name for name in state.services if service_of(name) == "scheduler"]
    rest = [name for service in ("tokenizer", "kvstore") for name in state.services if service_of(name) == service]
    return [*(Turn(replica_of(name)) for name in schedulers), *(Turn((name,)) for name in rest)]


def turns_of(state: StackState, wanted: Sequence[str]) -> list[Turn]:
    """Return a turn for each member (`worker-2`), and one for each member of a service (`worker`). Raises
    InvalidArgument for other words."""
    turns = []
    for word in wanted:
        names = [name for name in state.services if word in (name, service_of(name))]
        if not names:
            known = ", ".join(state.services)
            raise InvalidArgument("UNKNOWN_SERVICE", f"There is no {word!r}.", f"Choose of {known}.")
        turns += [Turn((name,)) for name in names]
    return turns


class Rolling:
    """`limit_s`: how long a process may drain, and another get ready, before it is an error. `tell` hears of steps."""

    def __init__(
        self, directory: StateDirectory, limit_s: float, tell: Callable[[str], None] = lambda line: None
    ) -> None:
        self._directory = directory
        self._limit_s = limit_s
        self._tell = tell

    def run(self, turns: Sequence[Turn]) -> None:
        """Restart the members of each turn, and begin the next turn when they are ready again. Raises DeadlineExceeded,
        or FailedPrecondition where the stack ends meanwhile."""
        for turn in turns:
            began = time.monotonic()
            before = {name: self._service(name) for name in turn.members}
            for name, service in before.items():
                self._end(name, service)
            for name, service in before.items():
                self._await_ready(name, service)
            self._tell(f"{', '.join(turn.members)}: restarted in {time.monotonic() - began:.1f} s")

    def _end(self, name: str, service: ServiceState) -> None:
        """Have a member's process drain and end, and kill it after `limit_s`. If it is down already, its supervisor is
        asked to start it."""
        process = service.process
        if not process.signal(signal.SIGTERM):
            # It is down already, and its supervisor may have given it up: SIGHUP is another chance.
            self._state().supervisor.signal(signal.SIGHUP)
        elif not process.wait(self._limit_s):
            self._tell(f"{name}: not drained after {self._limit_s:g} s, killed")
            process.signal(signal.SIGKILL)
            process.wait(_KILL_S)

    def _await_ready(self, name: str, before: ServiceState) -> None:
        """Wait until another process of the member is ready. Raises DeadlineExceeded after `limit_s`."""
        deadline = time.monotonic() + self._limit_s
        while (now := self._service(name)).process == before.process or now.phase != "ready":
            if time.monotonic() > deadline:
                raise DeadlineExceeded(
                    "RESTART_TIMEOUT",
                    f"The {name} was not ready {self._limit_s:g} s after it ended (phase: {now.phase}).",
                    f"See `quire logs {name}`; a larger model may need a longer --timeout.",
                )
            time.sleep(_POLL_S)

    def _service(self, name: str) -> ServiceState:
        return self._state().services[name]

    def _state(self) -> StackState:
        """Return the stack's state. Raises FailedPrecondition unless it is ready."""
        state = self._directory.running()
        if state is None or state.phase != "ready":
            raise FailedPrecondition(
                "NOT_RUNNING", f"No stack named {self._directory.name!r} serves here.", "Start one with `quire up`."
            )
        return state
