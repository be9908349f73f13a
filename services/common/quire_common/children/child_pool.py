"""A pool of child processes of one program. Children are started when needed, killed when they are too slow, and
replaced when they have died. A failure affects only one job.

This module knows nothing of what the jobs are.
"""

from __future__ import annotations

import asyncio
import signal
from typing import TYPE_CHECKING, Literal

from quire_common.children.bounded_slots import BoundedSlots
from quire_common.children.child_process import ChildProcess

if TYPE_CHECKING:
    from collections.abc import Callable

    from quire_common.children.child_process import ChildProgram
    from quire_common.children.frames import Frame
    from quire_common.errors import QuireError

# Signals of the timers by which a child ends itself.
_TIMERS = (signal.SIGALRM, signal.SIGPROF)


class ChildFailed(Exception):
    """A job took too long, or its process died or broke the protocol. `out_of_cpu`: it took too much processor time,
    as it would again, however busy the machine is."""

    def __init__(self, how: Literal["timeout", "crashed"], *, out_of_cpu: bool = False) -> None:
        super().__init__(how)
        self.how = how
        self.out_of_cpu = out_of_cpu


class ChildPool:
    """Used from one event loop. At most `max_jobs` jobs run or wait. `overloaded` makes the error of a job that is one
    too many; its argument is the number of the other jobs."""

    def __init__(
        self,
        program: ChildProgram,
        processes: int,
        max_jobs: int,
        timeout_s: float,
        overloaded: Callable[[int], QuireError],
    ) -> None:
        self._program = program
        self._timeout_s = timeout_s
        self._slots = BoundedSlots(processes, max_jobs, overloaded)
        self._idle: list[ChildProcess] = []

    async def run(self, job: bytes, payload: bytes = b"") -> Frame:
        """Wait for a free child, have it do a framed job, and return its answer. Raises the pool's own error if too
        many jobs run or wait. Raises ChildFailed if the job, without its wait and the start of a child, takes longer
        than `timeout_s`, or if the child fails. The errors of `ChildProcess.start` pass on."""
        async with self._slots.slot():
            return await self._ask(job, payload)

    async def close(self) -> None:
        """End all idle processes. A process that works on a job ends if the job's request is cancelled; after a job
        that ends well, it stays idle. Later jobs are not refused."""
        while self._idle:
            await self._idle.pop().kill()

    def _idle_child(self) -> ChildProcess | None:
        """Take an idle child out of the pool and return it; None if there is none. Children that have died while they
        were idle are forgotten."""
        while self._idle:
            child = self._idle.pop()
            if child.alive:
                return child
        return None

    async def _ask(self, job: bytes, payload: bytes) -> Frame:
        """Have an idle child or a new child do the job, and keep the child for the next job. If the child takes longer
        than `timeout_s`, dies or breaks the protocol, kill it and raise ChildFailed (`timeout` too if a timer of its
        own ended it); if the caller is cancelled, kill it too. If a child that was idle has been killed (SIGKILL) by
        another process, before the job or during it, the next child does the job. `timeout_s` does not cover the start
        of a child, whose errors pass on (see `ChildProcess.start`)."""
        idle = self._idle_child()
        child = idle or await ChildProcess.start(self._program)
        try:
            answer = await asyncio.wait_for(child.ask(job, payload), self._timeout_s)
        except BaseException as error:
            # Also when the caller has gone away: the child is in the middle of an answer that nobody will read.
            ended_by = -(await asyncio.shield(child.kill()) or 0)
            if isinstance(error, TimeoutError):
                raise ChildFailed("timeout") from error
            if idle is not None and isinstance(error, OSError | EOFError) and ended_by == signal.SIGKILL:
                return await self._ask(job, payload)
            if isinstance(error, OSError | EOFError | ValueError):
                how: Literal["timeout", "crashed"] = "timeout" if ended_by in _TIMERS else "crashed"
                raise ChildFailed(how, out_of_cpu=ended_by == signal.SIGPROF) from error
            raise
        self._idle.append(child)
        return answer
