"""The rendering processes, seen from the service: started when needed, killed when too slow, replaced when dead.

Each renders one conversation at a time. A failure is that of the one request. Knows nothing of what is rendered.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quire_common.errors import InvalidArgument, Overloaded, QuireError, TooLarge, Unavailable
from quire_common.telemetry.logs import get_logger
from quire_tokenizer.chat.render_child import LENGTH

if TYPE_CHECKING:
    from collections.abc import Mapping

log = get_logger(__name__)
_START_S = 30.0
# The alarm of a child whose parent is gone comes later than the parent's own limit.
_ALARM_FACTOR = 3.0
_ESCAPED_BYTES_PER_CHAR = 12


@dataclass(frozen=True)
class RenderLimits:
    """What one rendering may use."""

    timeout_s: float
    memory_bytes: int
    max_chars: int


class RenderPool:
    """Used from one event loop."""

    def __init__(self, processes: int, max_waiting: int, limits: RenderLimits) -> None:
        self._limits = limits
        self._max_waiting = max_waiting
        self._waiting = 0
        self._slots = asyncio.Semaphore(processes)
        self._idle: list[_Child] = []

    async def render(self, source: str, variables: Mapping[str, Any]) -> str:
        """Render the template in a child process, waiting for a free one. Raises Overloaded where too many wait, and
        InvalidArgument and the like with what is wrong with template or conversation."""
        if self._waiting >= self._max_waiting:
            raise Overloaded(
                "TOKENIZER_OVERLOADED",
                f"{self._waiting} conversations are waiting to be rendered.",
                "Retry, or run more tokenizers.",
                retry_after_s=1.0,
            )
        job = json.dumps({"source": source, "variables": variables, "max_chars": self._limits.max_chars}).encode()
        self._waiting += 1
        try:
            async with self._slots:
                answer = await self._run(job)
        finally:
            self._waiting -= 1
        text = answer.get("text")
        if isinstance(text, str):
            return text
        raise _failure(str(answer.get("error")), str(answer.get("message")))

    async def close(self) -> None:
        """End all processes that are idle; those at work are ended by their cancelled requests."""
        while self._idle:
            await self._idle.pop().kill()

    async def _run(self, job: bytes) -> dict[str, Any]:
        """Have an idle child, or a new one, do the job, and return its answer. If it is too slow or dies, or the caller
        leaves, the child is killed and the error raised."""
        child = self._idle.pop() if self._idle else await _Child.start(self._limits)
        try:
            answer = await asyncio.wait_for(child.ask(job), self._limits.timeout_s)
        except BaseException as error:
            # Also when the caller has gone away: the child is in the middle of an answer that nobody will read.
            await asyncio.shield(child.kill())
            if isinstance(error, TimeoutError):
                raise _failure("timeout", "") from error
            if isinstance(error, OSError | EOFError | ValueError):
                log.warning("a rendering process died", code="CHAT_TEMPLATE_CRASHED")
                raise _failure("crashed", "") from error
            raise
        self._idle.append(child)
        return answer


class _Child:
    def __init__(self, process: asyncio.subprocess.Process, max_answer: int) -> None:
        self._process = process
        self._max_answer = max_answer

    @classmethod
    async def start(cls, limits: RenderLimits) -> _Child:
        """Start a rendering process with a bare environment, and wait until it is ready. Raises Unavailable."""
        # Of the environment, only what Python needs: no keys, no addresses.
        environment = {"PYTHONPATH": os.pathsep.join(p for p in sys.path if p), "PATH": os.environ.get("PATH", "")}
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "quire_tokenizer.chat.render_child"),
            *(str(limits.memory_bytes), str(limits.timeout_s * _ALARM_FACTOR)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=environment,
        )
        child = cls(process, limits.max_chars * _ESCAPED_BYTES_PER_CHAR + 4096)
        try:
            await asyncio.wait_for(child._read(), _START_S)
        except BaseException as error:
            await asyncio.shield(child.kill())
            if isinstance(error, TimeoutError | OSError | EOFError | ValueError):
                raise Unavailable(
                    "RENDER_PROCESS_FAILED",
                    "The process that renders chat templates did not start.",
                    "See the tokenizer's log.",
                    retry_after_s=1.0,
                ) from error
            raise
        return child

    async def ask(self, job: bytes) -> dict[str, Any]:
        """Send a job and wait for its answer. Raises OSError or EOFError where the process has died, ValueError for an
        answer that is too long."""
        stdin = self._process.stdin
        if stdin is None:
            raise EOFError
        stdin.write(LENGTH.pack(len(job)) + job)
        await stdin.drain()
        return await self._read()

    async def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self._process.kill()
        await self._process.wait()

    async def _read(self) -> dict[str, Any]:
        """Read one message from the process. Raises EOFError where it has ended, ValueError for a message that is too
        long."""
        stdout = self._process.stdout
        if stdout is None:
            raise EOFError
        (length,) = LENGTH.unpack(await stdout.readexactly(LENGTH.size))
        if length > self._max_answer:
            raise ValueError("the answer is too long")
        loaded: dict[str, Any] = json.loads(await stdout.readexactly(length))
        return loaded


_FIX_TEMPLATE = "Use a template that this model's conversations fit."
_FAILURES: Mapping[str, tuple[type[QuireError], str, str, str]] = {
    "refused": (InvalidArgument, "CONVERSATION_REFUSED", "The chat template refuses it: {}", "Change the messages."),
    "syntax": (InvalidArgument, "BAD_CHAT_TEMPLATE", "The chat template is no valid template: {}", "Correct it."),
    "forbidden": (InvalidArgument, "BAD_CHAT_TEMPLATE", "The chat template does what is forbidden.", _FIX_TEMPLATE),
    "too_large": (TooLarge, "RENDERED_TEXT_TOO_LARGE", "The rendered conversation is too long.", "Shorten it."),
    "memory": (InvalidArgument, "BAD_CHAT_TEMPLATE", "The chat template uses too much memory.", _FIX_TEMPLATE),
    "recursion": (InvalidArgument, "BAD_CHAT_TEMPLATE", "The chat template recurses too deeply.", _FIX_TEMPLATE),
    "timeout": (InvalidArgument, "CHAT_TEMPLATE_TIMEOUT", "The chat template takes too long.", _FIX_TEMPLATE),
    "crashed": (InvalidArgument, "CHAT_TEMPLATE_CRASHED", "The chat template broke its process.", _FIX_TEMPLATE),
    "failed": (InvalidArgument, "CHAT_TEMPLATE_FAILED", "The chat template fails on this conversation.", _FIX_TEMPLATE),
}


def _failure(kind: str, detail: str) -> QuireError:
    cls, code, message, fix = _FAILURES.get(kind, _FAILURES["failed"])
    if detail and kind != "refused":  # a refusal may quote the conversation
        log.info("a chat template failed", code=code, reason=detail)
    return cls(code, message.format(detail), fix, param="messages")
