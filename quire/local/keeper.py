"""Keeper: restarts one member of a ready stack whenever its process ends; the new process has the same port.

A member is one process of a stack. RestartPolicy chooses the delay: none after a process that ended in order, and a
growing delay after crashes. A process that does not serve in time is ended. After several failed starts in a row, the
member is given up.
"""

from __future__ import annotations

import asyncio
import random
from contextlib import suppress
from typing import Any, NoReturn

from quire.local.process import FAILED_STOP_S, ChildProcess
from quire.local.roster import Roster
from quire.local.spec import StackSpec

_MOST_S = 10.0
# After a process has served for so long, earlier crashes do not count any more.
_HEALTHY_S = 10.0
# The keeper gives up a member after this many processes in a row that ended before they could serve.
_FAILED_STARTS = 5


class RestartPolicy:
    """Decides when one member is started again, and when it is given up."""

    def __init__(self, first_s: float) -> None:
        self._first_s = self._next_s = first_s
        self._failed_starts = 0

    def delay_s(self, exit_code: int | None, served_s: float | None) -> float | None:
        """Return the seconds until the next process is started; None if the member is given up. `served_s` is how long
        the last process served requests; None if it never did. Call this once for each end of a process, since it
        counts them.

        After five processes in a row that never served, the member is given up. Exit code 0 after serving means no
        delay. Other delays double from `first_s` to 10 s, times a random number from 0.5 to 1. They begin anew after a
        process that served for 10 s and did not end in order.
        """
        if served_s is None:
            self._failed_starts += 1
            if self._failed_starts >= _FAILED_STARTS:
                return None
        else:
            self._failed_starts = 0
            if exit_code == 0:
                return 0.0
            if served_s >= _HEALTHY_S:
                self._next_s = self._first_s
        step, self._next_s = self._next_s, min(self._next_s * 2, _MOST_S)
        return step * random.uniform(0.5, 1.0)

    def reset(self) -> None:
        """Forget earlier failures, because an operator asked for another start."""
        self._next_s, self._failed_starts = self._first_s, 0


class Keeper:
    """Keeps one member alive. Cancel `run` before the member is stopped for good."""

    def __init__(self, name: str, spec: StackSpec, roster: Roster) -> None:
        self._name = name
        self._spec = spec
        self._roster = roster
        self._policy = RestartPolicy(spec.restart_delay_s)
        self._again = asyncio.Event()

    def retry(self) -> None:
        """Forget earlier failures, and start the next process at once if the member waits for a restart or was given
        up."""
        self._policy.reset()
        self._again.set()

    async def run(self) -> NoReturn:
        """Watch the member, which is ready when this method is called, and start another process, after the policy's
        delay, whenever it ends. The state file tells of each end and restart, and events of each but an end in order:
        exit code 0 after it served. A process that cannot be started counts as one that never served. A member that is
        given up waits for `retry`. Raises StartFailed instead if the stack cannot serve without it."""
        clock = asyncio.get_running_loop().time
        child: ChildProcess = self._roster.children[self._name]
        ready_at: float | None = clock()
        while True:
            await child.exited.wait()
            served_s = None if ready_at is None else clock() - ready_at
            delay_s = self._policy.delay_s(child.exit_code, served_s)
            asked = child.exit_code == 0 and served_s is not None
            self._again.clear()
            self._roster.ended(self._name, -1.0 if delay_s is None else delay_s, asked=asked)
            if delay_s is None and not self._spec.serves_without(self._roster.lost()):
                raise self._roster.start_failed(self._name)
            await self._pause(delay_s)
            ready_at = None
            with suppress(OSError):  # no memory for a fork, say: one more start that failed
                child = self._roster.spawn_again(self._name)
                ready_at = clock() if await self._await_serving(child) else None

    async def _pause(self, delay_s: float | None) -> None:
        """Wait `delay_s` seconds (None: without limit), or until `retry` is called."""
        try:
            async with asyncio.timeout(delay_s):
                await self._again.wait()
        except TimeoutError:
            return

    async def _await_serving(self, child: ChildProcess) -> bool:
        """Wait until the process serves or has ended. After `start_timeout_s` it gets SIGTERM, and SIGKILL 5 s later.
        Returns whether it serves; if so, an event reports the restart."""
        serving = asyncio.ensure_future(self._roster.until_serving(self._name))
        ended: asyncio.Future[Any] = asyncio.ensure_future(child.exited.wait())
        try:
            limit_s = self._spec.start_timeout_s
            done, _ = await asyncio.wait({serving, ended}, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                self._roster.stop_timed_out(self._name)
                await asyncio.wait({ended}, timeout=FAILED_STOP_S)
                child.kill()
                await ended
        finally:
            serving.cancel()
            ended.cancel()
            await asyncio.gather(serving, ended, return_exceptions=True)
        if child.exited.is_set():
            return False
        serving.result()
        self._roster.restarted(self._name)
        return True
