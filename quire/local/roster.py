"""Roster: the processes of a stack's members, with their ports, their phases, and their entries in the state file. A
member is one process of the stack.

This module does not decide when members start or end. Used from the supervisor's event loop.
"""

from __future__ import annotations

import asyncio
import errno
import os
import sys
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from quire.errors import StartFailed
from quire.local.events import Died, Event, Progress, Restarted
from quire.local.pids import MARK_VARIABLE, ProcessId
from quire.local.ports import HeldPorts
from quire.local.process import ChildProcess
from quire.local.readiness import follow_load, wait_http_ready, wait_serving
from quire.local.root_cause import RootCause, read_root_cause
from quire.local.spec import LOOPBACK, StackSpec, join, service_of
from quire.local.state import ServiceState, StackState, StateDirectory

# All members share the machine's cores, and requests wait for the worker's steps. So the other members have a lower
# priority than the worker. Measured in bench/LOG.md.
NICENESS = 5
# The least time between two Progress events about one phase.
_PROGRESS_S = 0.1


class Roster:
    """The members of one stack. `state` is written to the state file after each change, as far as the disk allows."""

    def __init__(self, spec: StackSpec, directory: StateDirectory, emit: Callable[[Event], None]) -> None:
        self.children: dict[str, ChildProcess] = {}
        own = ProcessId.of(os.getpid())
        self.state = StackState(spec.name, uuid.uuid4().hex, spec.model, own, tls_folder=spec.tls_folder)
        self._spec = spec
        self._directory = directory
        self._emit = emit
        self._held = HeldPorts()
        self._ports: dict[str, int] = {}
        self._last_progress: dict[str, float] = {}
        # By member, the cause START_TIMEOUT of a process that this roster stopped.
        self._timed_out: dict[str, RootCause] = {}
        self._state_is_stale = False
        self._began = time.monotonic()

    def choose_ports(self) -> None:
        """Choose and hold a port for every member, and one for HTTP. The user may choose the router's gRPC port
        (--grpc-port) and the HTTP port (--port). If such a port is 0, it is a free one, as that of every other member
        is. The user's two ports are held on the spec's host, and the others on loopback; in network namespaces, free
        ports are always on loopback. The ports stay held, beside the members that listen on them, until `close` or the
        next call. Does not write the state file. Raises StartFailed if one of the user's two ports cannot be bound
        (PORT_IN_USE if another process has it, or if it is chosen twice; else BAD_VALUE), and OSError if no free port
        of loopback can be bound."""
        self._held.close()
        asked = {"http": (self._spec.port, "--port"), "router": (self._spec.grpc_port, "--grpc-port")}
        # The user's ports come first: otherwise a free port could be one of them.
        for name in sorted((*self._spec.members, "http"), key=lambda name: not asked.get(name, (0, ""))[0]):
            port, flag = asked.get(name, (0, ""))
            # A member in a network namespace of its own has all ports to itself, so any port will do.
            host = self._spec.host if flag and (port or not self._spec.hosts) else LOOPBACK
            try:
                self._ports[name] = self._held.reserve(host, port) if port else self._held.choose(host)
            except OSError as error:
                if not flag:
                    raise
                raise _cannot_listen(host, port, flag, error) from error

    def spawn_all(self) -> None:
        """Start the first process of every member, write the state file with their ports and the stack's addresses,
        and report each as `starting`. Does not wait for them. Raises OSError if one cannot be started; those before
        it run. Raises OSError too if the state file cannot be written: `quire down` would not find the stack."""
        for name in self._spec.members:
            self._spawn(name, again=False)
        self.state.set_addresses(
            f"{'https' if self._tls else 'http'}://{join(self._spec.reached_at('http'), self._ports['http'])}",
            join(self._spec.reached_at("router"), self._ports["router"]),
        )
        self._directory.write(self.state)
        for name in self._spec.members:
            self._progress(name, "starting")

    def spawn_again(self, name: str) -> ChildProcess:
        """Start another process in the place of one that ended, on the same port, and return it. The state file counts
        the restart. An event reports it as `starting`. Does not wait until it serves. Raises OSError if no process can
        be started."""
        self._spawn(name, again=True, restarts=self.state.services[name].restarts + 1)
        self._write()
        self._progress(name, "starting")
        return self.children[name]

    async def until_serving(self, name: str) -> None:
        """Return when the member can do its work: by gRPC health, and for the router also by /readyz, or by that alone
        if the router serves TLS. Then the state file and an event say `ready`. Waits without limit. Until then, events
        report its progress, for a worker that of its loading."""
        service = service_of(name)
        address = join(self._spec.reached_at(name), self._ports[name])
        loading: asyncio.Task[None] | None = None
        folder = self._spec.tls_folder
        if service == "worker":
            loading = asyncio.create_task(follow_load(address, partial(self._loading, name), folder))
        try:
            # The public certificate of a router may lack this address. Its HTTP port says the same, and is asked
            # without a check of names.
            if service != "router" or not self._tls:
                await wait_serving(address, service, folder)
            if service == "router":
                self._progress(name, "connecting")
                await wait_http_ready(self._spec.reached_at("http"), self._ports["http"], tls=self._tls)
        finally:
            if loading is not None:
                loading.cancel()
        self._progress(name, "ready")

    def cause_of_end(self, name: str) -> RootCause:
        """Return the cause of the end of the member's process: START_TIMEOUT if this roster stopped it for that, and
        otherwise the cause that its log and exit code tell."""
        child = self.children[name]
        return self._timed_out.get(name) or read_root_cause(child.log, child.exit_code, child.log_start)

    def ended(self, name: str, restart_in_s: float, *, asked: bool) -> None:
        """Record in the state file that the member's process has ended: the phase is `exited`, or `failed` if the
        member is given up. Unless the process was `asked` to end, an event reports the cause. A negative `restart_in_s`
        means that the member is given up."""
        state = self.state.services[name]
        phase = "exited" if restart_in_s >= 0 else "failed"
        if asked:
            state.enter_phase(phase, state.detail)
            self._write()
            return
        cause = self.cause_of_end(name)
        state.enter_phase(phase, f"{cause.code}: {cause.message}")
        self._write()
        log = str(self.children[name].log)
        self._emit(Died(name, cause.code, cause.message, cause.fix, log, round(restart_in_s, 3)))

    def restarted(self, name: str) -> None:
        """Report by an event that the member serves again."""
        self._emit(Restarted(name, self.state.services[name].restarts))

    def start_failed(self, name: str) -> StartFailed:
        """Return the error of a stack that cannot serve without this member, whose process has ended."""
        cause = self.cause_of_end(name)
        return StartFailed(cause.code, cause.message, cause.fix, service=name, log=str(self.children[name].log))

    def start_timeout_error(self) -> StartFailed:
        """Return the error START_TIMEOUT of a stack that is not ready in time. The error names the first member that is
        not ready, with its phase and log."""
        name = next(name for name in self._spec.members if self.state.services[name].phase != "ready")
        cause = self._start_timeout_cause(name)
        return StartFailed(cause.code, cause.message, cause.fix, service=name, log=str(self._directory.log(name)))

    def stop_timed_out(self, name: str) -> None:
        """Send SIGTERM to a member that is not ready in time. The cause of its end is then START_TIMEOUT."""
        self._timed_out[name] = self._start_timeout_cause(name)
        self.children[name].terminate()

    def lost(self) -> Sequence[str]:
        """Return the members that are given up."""
        return [name for name, service in self.state.services.items() if service.phase == "failed"]

    def set_phase(self, phase: str) -> None:
        """Set the phase of the whole stack, and write the state file."""
        self.state.enter_phase(phase)
        self._write()

    def seconds(self) -> float:
        """Return the seconds since the roster was made."""
        return round(time.monotonic() - self._began, 3)

    def close(self) -> None:
        """Release the ports."""
        self._held.close()

    def _spawn(self, name: str, *, again: bool, restarts: int = 0) -> None:
        """Start a process of the member with its command line, environment, stack mark and log, and enter it in the
        state as `starting`; the caller writes the state file. Members other than workers run at a lower priority.
        `again`: append to the log of the member's earlier process. `restarts` is the number of its restarts."""
        environment = {**self._spec.environment(name), MARK_VARIABLE: self.state.stack_id}
        command = self._spec.command(name, self._ports)
        niceness = 0 if service_of(name) == "worker" else NICENESS
        child = ChildProcess(name, command, self._directory.log(name), environment, again=again, niceness=niceness)
        self.children[name] = child
        self._timed_out.pop(name, None)
        process = child.process
        self.state.services[name] = ServiceState(process.pid, process.start_time, self._ports[name], restarts=restarts)

    def _start_timeout_cause(self, name: str) -> RootCause:
        """Return the cause START_TIMEOUT, with the member's phase."""
        return RootCause(
            "START_TIMEOUT",
            f"It was not ready after {self._spec.start_timeout_s:g} s (phase: {self.state.services[name].phase}).",
            "See its log; a larger model may need a longer --start-timeout.",
        )

    def _loading(self, name: str, phase: str, share: float, detail: str) -> None:
        if phase != "ready":  # that is for its health to say
            self._progress(name, phase, share, detail)

    def _progress(self, name: str, phase: str, share: float = -1.0, detail: str = "") -> None:
        """Report a member's progress. If phase or detail has changed, write it to the state file and send an event.
        Otherwise send an event at most every 0.1 s, or if the phase is complete. Does nothing when the member is ready.
        `share` is the progress within the phase, from 0 to 1 (-1: unknown)."""
        state = self.state.services[name]
        if state.phase == "ready":
            return  # a last word of the loading that came late
        changed = state.enter_phase(phase, detail)
        seconds = self.seconds()
        if changed:
            self._write()
        elif share < 1 and seconds - self._last_progress.get(name, -_PROGRESS_S) < _PROGRESS_S:
            return
        self._last_progress[name] = seconds
        self._emit(Progress(name, phase, seconds, share, detail))

    def _write(self) -> None:
        """Write the state file. If that fails, as on a full disk, the file keeps the state that was written last; the
        members run on, and the next change is written with all before it. The first failure in a row is logged."""
        try:
            self._directory.write(self.state)
            self._state_is_stale = False
        except OSError as error:
            if not self._state_is_stale:
                self._state_is_stale = True
                with suppress(OSError):
                    print(f"The state file cannot be written: {error}.", file=sys.stderr, flush=True)

    @property
    def _tls(self) -> bool:
        return bool(self._spec.tls_folder or self._spec.flags.get("router", {}).get("ssl-certfile"))


def _cannot_listen(host: str, port: int, flag: str, error: OSError) -> StartFailed:
    """Return the error for a port (0: any free one) of the host, chosen by this flag, that cannot be bound. It is
    PORT_IN_USE if another process has the port. Otherwise it is BAD_VALUE: the host or port is wrong, or no file
    descriptor is left."""
    where = f"{f'port {port}' if port else 'a free port'} of {host}"
    cause = f"The stack cannot listen on {where}: {error.strerror or error}."
    if error.errno == errno.EADDRINUSE:
        fix = f"Stop the process that has the port, or choose another port with {flag} (0 picks a free one)."
        return StartFailed("PORT_IN_USE", cause, fix)
    fix = f"Give an address of this machine with --host, and with {flag} a port that this user may take."
    if error.errno in (errno.EMFILE, errno.ENFILE):
        fix = "Let this process open more files (ulimit -n), or the system (fs.file-max)."
    return StartFailed("BAD_VALUE", cause, fix)
