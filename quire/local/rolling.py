"""Restarts the members of a running stack in turn, from another process, which finds them in the stack's state file.

A member is one process of a stack. Each member gets SIGTERM, drains and ends. The supervisor starts another process in
its place. The next member has its turn when this process is ready. If a service has several members, requests go to the
other members meanwhile.
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
# The time to wait for the end of a process after SIGKILL.
_KILL_S = 10.0


@dataclass(frozen=True)
class Turn:
    """Members that are restarted together. Members that call other members end before these."""

    members: tuple[str, ...]


def rolling_turns(state: StackState) -> list[Turn]:
    """Return the turns of a rolling restart: one for every replica (scheduler and worker together), then one for every
    tokenizer, then the kvstore's. The router has no turn, because its restart would break the clients' connections."""
    schedulers = [name for name in state.services if service_of(name) == "scheduler"]
    rest = [name for service in ("tokenizer", "kvstore") for name in state.services if service_of(name) == service]
    return [*(Turn(replica_of(name)) for name in schedulers), *(Turn((name,)) for name in rest)]


def turns_of(state: StackState, wanted: Sequence[str]) -> list[Turn]:
    """Return a turn for each named member (`worker-2`), and for a service (`worker`) one turn for each of its members;
    a member that is meant twice has two. Raises InvalidArgument for other words."""
    turns = []
    for word in wanted:
        names = [name for name in state.services if word in (name, service_of(name))]
        if not names:
            known = ", ".join(state.services)
            raise InvalidArgument("UNKNOWN_SERVICE", f"There is no {word!r}.", f"Choose of {known}.")
        turns += [Turn((name,)) for name in names]
    return turns


class Rolling:
    """Restarts members. `limit_s` is the time for which a process may drain; after it, the process is killed. It is
    also the time in which the new process must get ready. `tell` is called with a line of text for each step."""

    def __init__(
        self, directory: StateDirectory, limit_s: float, tell: Callable[[str], None] = lambda line: None
    ) -> None:
        self._directory = directory
        self._limit_s = limit_s
        self._tell = tell

    def run(self, turns: Sequence[Turn]) -> None:
        """Restart the members of each turn, and begin the next turn when they are ready again; `tell` gets a line for
        each turn. Raises DeadlineExceeded if a member is not ready in time, FailedPrecondition if the stack is not
        ready or ends meanwhile."""
        for turn in turns:
            began = time.monotonic()
            before = {name: self._service(name) for name in turn.members}
            for name, service in before.items():
                self._end(name, service)
            for name, service in before.items():
                self._await_ready(name, service)
            self._tell(f"{', '.join(turn.members)}: restarted in {time.monotonic() - began:.1f} s")

    def _end(self, name: str, service: ServiceState) -> None:
        """Send SIGTERM to a member's process, and wait until it has drained and ended. After `limit_s`, kill the
        process, and tell so by a line to `tell`. If the process has ended already, ask the supervisor by SIGHUP to
        start another, and with it all other members that wait or were given up."""
        process = service.process
        if not process.signal(signal.SIGTERM):
            # It is down already, and its supervisor may have given it up: SIGHUP is another chance.
            self._state().supervisor.signal(signal.SIGHUP)
        elif not process.wait(self._limit_s):
            self._tell(f"{name}: not drained after {self._limit_s:g} s, killed")
            process.signal(signal.SIGKILL)
            process.wait(_KILL_S)

    def _await_ready(self, name: str, before: ServiceState) -> None:
        """Wait until the state file shows another process than `before` for the member, in the phase `ready`. Raises
        DeadlineExceeded after `limit_s`, and FailedPrecondition if the stack is not ready any more."""
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
