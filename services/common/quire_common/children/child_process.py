"""The service's side of one child process: starts it with a bare environment, gives it one job after the other, and
kills it."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire_common.children.frames import HEADER, Frame
from quire_common.telemetry.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import Callable

    from quire_common.errors import QuireError

log = get_logger(__name__)
_START_S = 30.0
# A process whose pipes have ended is about to end itself.
_ENDING_S = 1.0
# A long answer comes in few pieces, each of which costs a turn of the loop.
_READ_AHEAD_BYTES = 1 << 20


@dataclass(frozen=True)
class ChildProgram:
    """A program to run in a child. `first_frame` is sent to the child before it reports that it is ready. `not_started`
    makes the error for a child that never reports this, or cannot be made. `max_answer`: the bytes of an answer's
    message and payload."""

    module: str
    arguments: tuple[str, ...]
    max_answer: int
    not_started: Callable[[], QuireError]
    first_frame: bytes = b""


class ChildProcess:
    """A started child. After an error of `ask`, only `kill` may be called."""

    def __init__(self, process: asyncio.subprocess.Process, max_answer: int) -> None:
        self._process = process
        self._max_answer = max_answer

    @classmethod
    async def start(cls, program: ChildProgram) -> ChildProcess:
        """Start a child with a bare environment, send it the program's first frame, and wait until it answers that it
        is ready. If it does not within 30 s, or fails, it is killed and the program's `not_started` error is raised.
        The same error is raised, and the cause logged, if no process can be made. What the child writes to standard
        error goes to the service's."""
        # The child gets only those variables that Python needs: no keys, no addresses.
        environment = {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "PATH": os.environ.get("PATH", "")}
        try:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", program.module, *program.arguments),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                limit=_READ_AHEAD_BYTES,
                env=environment,
            )
        except OSError as error:
            log.warning("no process can be made", program=program.module, reason=str(error))
            raise program.not_started() from error
        child = cls(process, program.max_answer)
        try:
            await asyncio.wait_for(child._begin(program.first_frame), _START_S)
        except BaseException as error:
            await asyncio.shield(child.kill())
            if isinstance(error, TimeoutError | OSError | EOFError | ValueError):
                raise program.not_started() from error
            raise
        return child

    @property
    def alive(self) -> bool:
        """Whether the process has not ended."""
        return self._process.returncode is None

    async def ask(self, job: bytes, payload: bytes = b"") -> Frame:
        """Send a framed job and its payload, and wait for the answer, without a time limit. Raises OSError or EOFError
        if the process has died, and ValueError for an answer that is too long, no JSON or nested too deeply."""
        await self._write(job, payload)
        return await self._read()

    async def kill(self) -> int | None:
        """End the process and wait for its end. A process whose pipes have ended gets one second to end by itself, so
        that its own status is found. Returns its exit status, negative for the signal that ended it; None if it did not
        end by itself."""
        if self._is_ending:
            # Popen looks for the end of a process before it signals it. The event loop, which waits for that end too,
            # then finds no process, and reports the status 255.
            with contextlib.suppress(TimeoutError):
                return await asyncio.wait_for(self._process.wait(), _ENDING_S)
        try:
            self._process.kill()
        except ProcessLookupError:
            return await self._process.wait()
        await self._process.wait()
        return None

    @property
    def _is_ending(self) -> bool:
        """Whether the process has closed its end of a pipe."""
        stdin, stdout = self._process.stdin, self._process.stdout
        return (stdin is not None and stdin.is_closing()) or (stdout is not None and stdout.at_eof())

    async def _begin(self, first_frame: bytes) -> None:
        """Send the first frame, if there is one, and wait for the child's report that it is ready."""
        if first_frame:
            await self._write(first_frame)
        await self._read()

    async def _write(self, frame: bytes, payload: bytes = b"") -> None:
        """Send a frame and its payload to the process, and wait until its pipe has room. Raises EOFError or OSError if
        the process has gone."""
        stdin = self._process.stdin
        if stdin is None:
            raise EOFError
        stdin.write(frame)
        if payload:
            stdin.write(payload)
        await stdin.drain()

    async def _read(self) -> Frame:
        """Read one frame from the process. Raises EOFError if the process has ended, and ValueError for a frame that is
        too long, or whose message is not JSON or is nested too deeply."""
        stdout = self._process.stdout
        if stdout is None:
            raise EOFError
        length, payload_bytes = HEADER.unpack(await stdout.readexactly(HEADER.size))
        if length + payload_bytes > self._max_answer:
            raise ValueError("the answer is too long")
        body = await stdout.readexactly(length)
        try:
            message = json.loads(body)
        except RecursionError as error:
            raise ValueError("the answer is nested too deeply") from error
        return Frame(message, await stdout.readexactly(payload_bytes))
