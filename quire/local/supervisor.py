"""Supervisor: starts a stack's services, reports their progress, keeps them alive, and stops them.

It is the main part of `python -m quire.local`: it runs in the main thread of its own process, on one event loop. It
sends events to its owner, and does not decide how they are shown. If a service dies before all services were ready, the
stack ends with the cause, unless another process had taken its port: then all are started again with other ports. A
service that dies later is started again (see keeper.py).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from quire.errors import StartFailed
from quire.local.events import Event, Failed, Ready, Stopped
from quire.local.keeper import Keeper
from quire.local.process import FAILED_STOP_S, ChildProcess
from quire.local.roster import Roster
from quire.local.spec import STOP_WAVES, StackSpec
from quire.local.state import StateDirectory

_PORT_ATTEMPTS = 3
# After the first death, how long others may take to die of the same cause, so that the right one is blamed.
_FAULT_S = 0.3


class Supervisor:
    """Runs one stack. `request_stop` may be called at any time; a second call ends the draining."""

    def __init__(self, spec: StackSpec, directory: StateDirectory, emit: Callable[[Event], None]) -> None:
        self._spec = spec
        self._emit = emit
        self._roster = Roster(spec, directory, emit)
        self._keepers: list[Keeper] = []
        self._stop, self._hurry = asyncio.Event(), asyncio.Event()

    def request_stop(self) -> None:
        """Have `run` drain the services and stop; a second call ends the draining. Returns at once."""
        (self._hurry if self._stop.is_set() else self._stop).set()

    def retry(self) -> None:
        """Start at once all members that wait for their restart or were given up."""
        for keeper in self._keepers:
            keeper.retry()

    async def run(self) -> bool:
        """Run the stack until a stop is requested. Returns False if its start failed, or if a member that it cannot do
        without was given up; then it is stopped too. A stop during the start returns True. At the end no member runs,
        and the ports are released."""
        try:
            return await self._live()
        finally:
            self._roster.close()

    async def _live(self) -> bool:
        """Start the stack, keep it alive, and stop it wave by wave. The state file and an event report the end. If the
        stack fails, stop all members, report the cause in the same way, and return False. At any other error, stop all
        members too, and raise it."""
        try:
            await self._start()
            if not self._stop.is_set():
                await self._keep()
        except StartFailed as error:
            await self._stop_children(FAILED_STOP_S, (self._spec.members,))
            self._roster.set_phase("failed")
            self._emit(Failed(error.service, error.code, error.message, error.fix, error.log))
            return False
        except BaseException:
            await self._stop_children(FAILED_STOP_S, (self._spec.members,))
            raise
        self._roster.set_phase("stopping")
        began = time.monotonic()
        waves = [tuple(name for service in wave for name in self._spec.members_of(service)) for wave in STOP_WAVES]
        killed = await self._stop_children(self._spec.drain_timeout_s, waves)
        self._roster.set_phase("stopped")
        self._emit(Stopped(time.monotonic() - began, killed))
        return True

    async def _start(self) -> None:
        """Start all members, and return when all serve or a stop was requested. If another process takes one of their
        ports, stop them and start all with other ports, in three attempts at most. Raises StartFailed if a member dies,
        not all are ready in time, or a port that the user has chosen cannot be bound."""
        for attempt in range(1, _PORT_ATTEMPTS + 1):
            self._roster.choose_ports()
            self._roster.spawn_all()
            try:
                await self._until_ready()
                return
            except StartFailed as error:
                if error.code != "PORT_IN_USE" or attempt == _PORT_ATTEMPTS:
                    raise
                # Somebody took one of our free ports first; the others know its address, so all start anew.
                await self._stop_children(FAILED_STOP_S, (self._spec.members,))

    async def _until_ready(self) -> None:
        """Wait until all members serve, and report this by the state file and an event; or return when a stop is
        requested. Raises StartFailed if not all are ready in time, or if a member dies. Members that die within 0.3 s
        are looked at together, and the first in order of dependency is the cause."""
        roster = self._roster
        ready = asyncio.gather(*(roster.until_serving(name) for name in self._spec.members))
        deaths = [asyncio.ensure_future(child.exited.wait()) for child in roster.children.values()]
        stop = asyncio.ensure_future(self._stop.wait())
        waiting: list[asyncio.Future[Any]] = [ready, *deaths, stop]
        try:
            done, _ = await asyncio.wait(
                waiting, timeout=self._spec.start_timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            if not done:
                raise roster.start_timeout_error()
            if any(death in done for death in deaths):
                await asyncio.wait(deaths, timeout=_FAULT_S)
                raise self._name_cause(name for name, child in roster.children.items() if child.exited.is_set())
            if ready in done:
                ready.result()
                roster.set_phase("ready")
                self._emit(Ready(roster.state.http, roster.state.grpc, roster.seconds()))
        finally:
            for future in waiting:
                future.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    async def _keep(self) -> None:
        """Keep all members alive until a stop is requested. Raises StartFailed if a member that the stack needs is
        given up."""
        self._keepers = [Keeper(name, self._spec, self._roster) for name in self._spec.members]
        stop: asyncio.Task[Any] = asyncio.create_task(self._stop.wait())
        tasks: list[asyncio.Task[Any]] = [stop, *(asyncio.create_task(keeper.run()) for keeper in self._keepers)]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _stop_children(self, limit_s: float, waves: Iterable[Sequence[str]]) -> tuple[str, ...]:
        """End the members of all waves, wave by wave, so that members end before the members that they call. Each wave
        gets SIGTERM; after `limit_s` in all, or a second stop request, those that still run are killed. Each later wave
        still gets SIGTERM, is killed at once, and is waited for. Returns the names of the killed ones, when all have
        ended. The roster then has no children: members in no wave are dropped from it, not ended."""
        deadline, killed = time.monotonic() + limit_s, list[str]()
        for wave in waves:
            children = [child for name, child in self._roster.children.items() if name in wave]
            for child in children:
                child.terminate()
            await self._exits(children, deadline - time.monotonic())
            for child in children:
                if not child.exited.is_set():
                    killed.append(child.name)
                    child.kill()
            await self._exits(children, None)
        self._roster.children.clear()
        return tuple(killed)

    async def _exits(self, children: Sequence[ChildProcess], limit_s: float | None) -> None:
        """Wait until all children have exited, `limit_s` seconds have passed, or a second stop was requested. Without a
        limit, wait only for the exits."""
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

    def _name_cause(self, dead: Iterable[str]) -> StartFailed:
        names = set(dead)
        return self._roster.start_failed(next(name for name in self._spec.members if name in names))
