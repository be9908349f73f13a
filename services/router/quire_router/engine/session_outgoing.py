"""What one life of a session has to tell its scheduler: submits and aborts, built only when the stream takes them.

Bounded by what it refers to: choices that are admitted and wait here once each. One that is aborted before the stream
took it is never sent. A message stays far below what gRPC carries, however long the prompts are.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

from quire.v1 import scheduler_pb2 as sb
from quire_common.columns import pack_i32
from quire_common.credit.hello import PROTOCOL_VERSION
from quire_common.errors import internal_error
from quire_common.sequence import context_to_pb, sequence_to_pb
from quire_common.telemetry.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from quire_router.core.choice import Choice

_MAX_BYTES = 4 * 1024 * 1024
_MAX_SUBMITS = 256
log = get_logger(__name__)


class SessionOutgoing:
    """Ends with its stream. `choices` is the session's table: what is not in it is not wanted any more."""

    def __init__(self, router_id: str, choices: Mapping[int, Choice]) -> None:
        self._router_id = router_id
        self._choices = choices
        self._submits: deque[Choice] = deque()
        self._aborts: list[int] = []
        self._wake = asyncio.Event()

    def submit(self, choice: Choice) -> None:
        """Start it there."""
        self._submits.append(choice)
        self._wake.set()

    def abort(self, handle: int) -> None:
        """Stop it there."""
        self._aborts.append(handle)
        self._wake.set()

    async def messages(self) -> AsyncIterator[sb.SessionRequest]:
        """The stream's requests."""
        yield sb.SessionRequest(hello=sb.SessionHello(protocol_version=PROTOCOL_VERSION, router_id=self._router_id))
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._submits or self._aborts:
                yield self._next()

    def _next(self) -> sb.SessionRequest:
        message, size = sb.SessionRequest(), 0
        while self._submits and size < _MAX_BYTES and len(message.submit) < _MAX_SUBMITS:
            choice = self._submits.popleft()
            if self._choices.get(choice.handle) is not choice:
                continue
            try:
                message.submit.append(_submit_to_pb(choice))
            except Exception:
                # One bad request must not end the stream of all.
                log.exception("a submit could not be made", request_id=choice.context.request_id)
                choice.fail(internal_error())
                continue
            size += message.submit[-1].ByteSize()
        if self._aborts:
            message.abort = pack_i32(self._aborts)
            self._aborts = []
        return message


def _submit_to_pb(choice: Choice) -> sb.Submit:
    return sb.Submit(
        handle=choice.handle,
        context=context_to_pb(choice.context),
        sequence=sequence_to_pb(choice.to_submit()),
    )
