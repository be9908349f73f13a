"""Supervisor: starts the five services, says how far they are, watches them, stops them.

The body of `python -m quire.local`: runs in the main thread of a process of its own, on one event loop. Talks to its
owner in events; decides nothing about how they are shown. A service that dies while serving is reported, not restarted.
"""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from quire.errors import StartFailed
from quire.local.events import Died, Event, Failed, Progress, Ready, Stopped
from quire.local.pids import MARK_VARIABLE, ProcessId
from quire.local.ports import free_ports, is_free
from quire.local.process import ChildProcess
from quire.local.readiness import follow_load, wait_http_ready, wait_serving
from quire.local.root_cause import read_root_cause
from quire.local.spec import LOOPBACK, SERVICES, STOP_WAVES, StackSpec, join
from quire.local.state import ServiceState, StackState, StateDirectory

_PORT_ATTEMPTS = 3
# After the first death, how long others may take to die of the same cause, so that the right one is blamed.
_BLAME_S = 0.3
# A stack that failed to start has nothing to drain.
_FAILED_STOP_S = 5.0
# Least time between two words about one phase.
_PROGRESS_S = 0.1


class Supervisor:
    """One stack. `request_stop` may be called at any time; a second call ends the draining."""

    def __init__(self, spec: StackSpec, directory: StateDirectory, emit: Callable[[Event], None]) -> None:
        self._spec = spec
        self._directory = directory
        self._emit = emit
        self._children: dict[str, ChildProcess] = {}
        self._ports: dict[str, int] = {}
        self._last_progress: dict[str, float] = {}
        self._stop, self._hurry = asyncio.Event(), asyncio.Event()
        self._began = time.monotonic()
        self._state = StackState(spec.name, uuid.uuid4().hex, spec.model, ProcessId.of(os.getpid()))

    def request_stop(self) -> None:
        """Drain and stop; the second time, without draining."""
        (self._hurry if self._stop.is_set() else self._stop).set()

    async def run(self) -> bool:
        """Live until stopped; whether the stack ever got ready, or was stopped before it could."""
        try:
            await self._start()
            if not self._stop.is_set():
                await self._watch()
        except StartFailed as error:
            await self._stop_children(_FAILED_STOP_S)
            self._set_phase("failed")
            self._emit(Failed(error.service, error.code, error.message, error.fix, error.log))
            return False
        except BaseException:
            await self._stop_children(_FAILED_STOP_S)
            raise
        self._set_phase("stopping")
        began = time.monotonic()
        killed = await self._stop_children(self._spec.drain_timeout_s)
        self._set_phase("stopped")
        self._emit(Stopped(time.monotonic() - began, killed))
        return True

    async def _start(self) -> None:
        """Return when all serve or a stop was asked for; raises StartFailed."""
        for attempt in range(1, _PORT_ATTEMPTS + 1):
            self._choose_ports()
            self._spawn()
            try:
                await self._until_ready()
                return
            except StartFailed as error:
                if error.code != "PORT_IN_USE" or attempt == _PORT_ATTEMPTS:
                    raise
                # Somebody took one of our free ports first; the others know its address, so all start anew.
                await self._stop_children(_FAILED_STOP_S)

    def _choose_ports(self) -> None:
        names = (*SERVICES, "http")
        self._ports = dict(zip(names, free_ports(len(names)), strict=True))
        for name, asked, flag in (("http", self._spec.port, "--port"), ("router", self._spec.grpc_port, "--grpc-port")):
            if asked and not is_free(self._spec.host, asked):
                raise StartFailed(
                    "PORT_IN_USE",
                    f"Port {asked} of {self._spec.host} is taken by another process.",
                    f"Stop that process, or choose another port with {flag} (0 picks a free one).",
                )
            self._ports[name] = asked or self._ports[name]

    def _spawn(self) -> None:
        for service in SERVICES:
            environment = {**self._spec.environment(service), MARK_VARIABLE: self._state.stack_id}
            command = self._spec.command(service, self._ports)
            child = ChildProcess(service, command, self._directory.log(service), environment)
            self._children[service] = child
            self._state.services[service] = ServiceState(
                child.process.pid, child.process.start_time, self._ports[service]
            )
        self._state.http = f"{'https' if self._tls else 'http'}://{join(self._spec.local_host, self._ports['http'])}"
        self._state.grpc = join(self._spec.local_host, self._ports["router"])
        self._directory.write(self._state)
        for service in SERVICES:
            self._progress(service, "starting")

    async def _until_ready(self) -> None:
        ready = asyncio.gather(*(self._until_serving(service) for service in SERVICES))
        deaths = [asyncio.ensure_future(child.exited.wait()) for child in self._children.values()]
        stop = asyncio.ensure_future(self._stop.wait())
        waiting: list[asyncio.Future[Any]] = [ready, *deaths, stop]
        try:
            done, _ = await asyncio.wait(
                waiting, timeout=self._spec.start_timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                raise self._too_slow()
            if any(death in done for death in deaths):
                await asyncio.wait(deaths, timeout=_BLAME_S)
                raise self._blame(name for name, child in self._children.items() if child.exited.is_set())
            if ready in done:
                ready.result()
                self._set_phase("ready")
                self._emit(Ready(self._state.http, self._state.grpc, self._seconds()))
        finally:
            for future in waiting:
                future.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    async def _until_serving(self, service: str) -> None:
        address = join(self._spec.local_host if service == "router" else LOOPBACK, self._ports[service])
        loading: asyncio.Task[None] | None = None
        if service == "worker":
            loading = asyncio.create_task(follow_load(address, lambda *progress: self._loading(service, *progress)))
        try:
            await wait_serving(address)
            if service == "router":
                self._progress(service, "connecting")
                await wait_http_ready(self._spec.local_host, self._ports["http"], tls=self._tls)
        finally:
            if loading is not None:
                loading.cancel()
        self._progress(service, "ready")

    async def _watch(self) -> None:
        """While serving: report each death once, until a stop is asked for."""
        stop = asyncio.ensure_future(self._stop.wait())
        alive: dict[asyncio.Future[Any], str] = {
            asyncio.ensure_future(child.exited.wait()): name for name, child in self._children.items()
        }
        while not stop.done():
            done, _ = await asyncio.wait({stop, *alive}, return_when=asyncio.FIRST_COMPLETED)
            for name in [alive.pop(future) for future in done if future in alive]:
                child = self._children[name]
                cause = read_root_cause(child.log, child.exit_code)
                self._state.services[name].phase = "exited"
                self._state.services[name].detail = f"{cause.code}: {cause.message}"
                self._directory.write(self._state)
                self._emit(Died(name, cause.code, cause.message, cause.fix, str(child.log)))
        for future in alive:
            future.cancel()

    async def _stop_children(self, limit_s: float) -> tuple[str, ...]:
        """End all, callers before those that they call; at the limit by force. Returns the names that needed force."""
        deadline, killed = time.monotonic() + limit_s, list[str]()
        for wave in STOP_WAVES if self._state.phase in ("stopping",) else (SERVICES,):
            children = [self._children[name] for name in wave if name in self._children]
            for child in children:
                child.terminate()
            await self._exits(children, deadline - time.monotonic())
            for child in children:
                if not child.exited.is_set():
                    killed.append(child.name)
                    child.kill()
            await self._exits(children, None)
        self._children.clear()
        return tuple(killed)

    async def _exits(self, children: Sequence[ChildProcess], limit_s: float | None) -> None:
        """Return when all have exited, at the limit, or when hurried."""
        exits: asyncio.Future[Any] = asyncio.gather(*(child.exited.wait() for child in children))
        if limit_s is None:
            await exits
            return
        hurry: asyncio.Future[Any] = asyncio.ensure_future(self._hurry.wait())
        try:
            await asyncio.wait({exits, hurry}, timeout=max(limit_s, 0), return_when=asyncio.FIRST_COMPLETED)
        finally:
            exits.cancel()
            hurry.cancel()
            await asyncio.gather(exits, hurry, return_exceptions=True)

    def _blame(self, dead: Iterable[str]) -> StartFailed:
        names = list(dead)
        name = next(service for service in SERVICES if service in names)
        child = self._children[name]
        cause = read_root_cause(child.log, child.exit_code)
        return StartFailed(cause.code, cause.message, cause.fix, service=name, log=str(child.log))

    def _too_slow(self) -> StartFailed:
        late = next(name for name in SERVICES if self._state.services[name].phase != "ready")
        service = self._state.services[late]
        return StartFailed(
            "START_TIMEOUT",
            f"It was not ready after {self._spec.start_timeout_s:g} s (phase: {service.phase}).",
            "See its log; a larger model may need a longer --start-timeout.",
            service=late,
            log=str(self._directory.log(late)),
        )

    def _loading(self, service: str, phase: str, share: float, detail: str) -> None:
        if phase != "ready":  # that is for its health to say
            self._progress(service, phase, share, detail)

    def _progress(self, service: str, phase: str, share: float = -1.0, detail: str = "") -> None:
        state = self._state.services[service]
        if state.phase == "ready":
            return  # a last word of the loading that came late
        changed = (state.phase, state.detail) != (phase, detail)
        state.phase, state.detail = phase, detail
        seconds = self._seconds()
        if changed:
            self._directory.write(self._state)
        elif share < 1 and seconds - self._last_progress.get(service, -_PROGRESS_S) < _PROGRESS_S:
            return
        self._last_progress[service] = seconds
        self._emit(Progress(service, phase, seconds, share, detail))

    def _set_phase(self, phase: str) -> None:
        self._state.phase = phase
        self._directory.write(self._state)

    def _seconds(self) -> float:
        return round(time.monotonic() - self._began, 3)

    @property
    def _tls(self) -> bool:
        return bool(self._spec.flags.get("router", {}).get("ssl-certfile"))
