"""The service's pool of rendering processes. A failure of a process affects only one conversation."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson

from quire_common.children.bounded_slots import BoundedSlots
from quire_common.children.child_pool import ChildFailed, ChildPool
from quire_common.children.child_process import ChildProgram
from quire_common.children.frames import framed
from quire_common.errors import InvalidArgument, Overloaded, QuireError, TooLarge
from quire_common.telemetry.logs import get_logger
from quire_tokenizer.work_pool import overloaded

if TYPE_CHECKING:
    from collections.abc import Mapping
    from contextlib import AbstractAsyncContextManager

log = get_logger(__name__)
# The alarm of a child whose parent is gone comes later than the parent's own limit.
_ALARM_FACTOR = 3.0
_BYTES_PER_CHAR = 4


@dataclass(frozen=True)
class RenderLimits:
    """The limits of one rendering."""

    timeout_s: float
    memory_bytes: int
    max_chars: int


class RenderPool:
    """Used from one event loop."""

    def __init__(self, processes: int, max_jobs: int, limits: RenderLimits) -> None:
        self._max_chars = limits.max_chars
        program = ChildProgram(
            "quire_tokenizer.chat.render_child",
            (str(limits.memory_bytes), str(limits.timeout_s * _ALARM_FACTOR)),
            limits.max_chars * _BYTES_PER_CHAR + 4096,
            _not_started,
        )
        self._children = ChildPool(program, processes, max_jobs, limits.timeout_s, _overloaded)
        self._large_slots = BoundedSlots(max(1, processes - 1), max_jobs, _overloaded)

    def large_conversation(self) -> AbstractAsyncContextManager[None]:
        """Return the context in which a large conversation is rendered. It waits while as many others are under way as
        there are processes less one (at least one), so that, of two or more processes, one is left for other
        conversations. Raises Overloaded if too many are under way or wait."""
        return self._large_slots.slot()

    async def render(self, source: str, variables: Mapping[str, Any]) -> str:
        """Wait for a free child process, render the template in it, and return the text. Raises Overloaded if too many
        renderings wait, or the process does not start. Raises InvalidArgument or TooLarge if the template fails or
        refuses, takes too much time or memory, writes too much, or ends its process. A crash of the process is logged,
        and so is the message of a template's error, unless the template refused."""
        values = _json(variables)
        job = framed({"source": source, "max_chars": self._max_chars}, len(values))
        try:
            answer, text = await self._children.run(job, values)
        except ChildFailed as error:
            if error.how == "crashed":
                log.warning("a rendering process died", code="CHAT_TEMPLATE_CRASHED")
            raise _failure(error.how, "") from error
        if "error" in answer:
            raise _failure(str(answer["error"]), str(answer.get("message")))
        return text.decode(errors="surrogatepass")

    async def close(self) -> None:
        """End the idle processes."""
        await self._children.close()


def _json(variables: Mapping[str, Any]) -> bytes:
    """Return the variables as JSON. They may be megabytes, and the event loop waits, so orjson writes them, in a tenth
    of json's time. What orjson refuses, lone surrogates and integers above 64 bits, json writes."""
    try:
        return orjson.dumps(variables)
    except TypeError:
        return json.dumps(variables).encode()


def _overloaded(waiting: int) -> QuireError:
    return overloaded(f"{waiting} conversations are waiting to be rendered.")


def _not_started() -> QuireError:
    """Return the error of a rendering whose child process did not start."""
    return Overloaded(
        "RENDER_PROCESS_FAILED",
        "The process that renders chat templates did not start.",
        "Retry; if it stays, see the tokenizer's log.",
        retry_after_s=1.0,
    )


_FIX_TEMPLATE = "Use a template that this model's conversations fit."
_FAILURES: Mapping[str, tuple[type[QuireError], str, str, str]] = {
    "refused": (InvalidArgument, "CONVERSATION_REFUSED", "The chat template refuses it: {}", "Change the messages."),
    "syntax": (InvalidArgument, "BAD_CHAT_TEMPLATE", "The chat template is not valid: {}", "Correct it."),
    "forbidden": (InvalidArgument, "BAD_CHAT_TEMPLATE", "The chat template does what is forbidden.", _FIX_TEMPLATE),
    "too_large": (TooLarge, "RENDERED_TEXT_TOO_LARGE", "The rendered conversation is too long.", "Shorten it."),
    "memory": (InvalidArgument, "BAD_CHAT_TEMPLATE", "The chat template uses too much memory.", _FIX_TEMPLATE),
    "recursion": (InvalidArgument, "BAD_CHAT_TEMPLATE", "The chat template recurses too deeply.", _FIX_TEMPLATE),
    "timeout": (InvalidArgument, "CHAT_TEMPLATE_TIMEOUT", "The chat template takes too long.", _FIX_TEMPLATE),
    "crashed": (InvalidArgument, "CHAT_TEMPLATE_CRASHED", "The chat template broke its process.", _FIX_TEMPLATE),
    "failed": (InvalidArgument, "CHAT_TEMPLATE_FAILED", "The chat template fails on this conversation.", _FIX_TEMPLATE),
}


def _failure(kind: str, detail: str) -> QuireError:
    """Return the error of a rendering that failed in this way (`kind`, a key of _FAILURES; any other counts as
    "failed"). `detail` is put into the error's message if that has a place for it, and is logged unless the template
    refused: a refusal may quote the conversation."""
    cls, code, message, fix = _FAILURES.get(kind, _FAILURES["failed"])
    if detail and kind != "refused":  # a refusal may quote the conversation
        log.info("a chat template failed", code=code, reason=detail)
    return cls(code, message.format(detail), fix, param="messages")
