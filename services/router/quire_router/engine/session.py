"""The one Session stream to a scheduler: submits and aborts out, steps in, each passed on to the tokenizer as it is.

A step's handle, count, token and finish columns go to the Detokenize stream untouched, one message per step.
Knows nothing of clients; a choice learns of its end here or from its Detokenize stream.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

from quire.v1 import scheduler_pb2 as sb
from quire.v1 import scheduler_pb2_grpc
from quire_common import errors
from quire_common.columns import pack_i32
from quire_common.credit.hello import PROTOCOL_VERSION
from quire_common.errors import Unavailable
from quire_common.sequence import context_to_pb, sequence_to_pb
from quire_common.telemetry.logs import get_logger
from quire_router.engine.session_codec import apply_events, apply_rows

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from quire_router.core.choice import Choice
    from quire_router.text.detokenize_stream import DetokenizeStream

_RETRY_AFTER_S = 1.0
log = get_logger(__name__)


class Session:
    """Lives as long as its replica; the stream below it may come and go. `choices` is shared with the detokenizer."""

    def __init__(
        self,
        instance: str,
        stub: scheduler_pb2_grpc.SchedulerStub,
        make_detokenizer: Callable[[dict[int, Choice], Callable[[Choice], None]], DetokenizeStream],
        router_id: str,
    ) -> None:
        self.instance = instance
        self.choices: dict[int, Choice] = {}
        self.detokenizer = make_detokenizer(self.choices, self._text_ended)
        self.open = False
        self._stub = stub
        self._router_id = router_id
        self._out = sb.SessionRequest()
        self._aborts: list[int] = []
        self._wake = asyncio.Event()

    def submit(self, choice: Choice) -> None:
        """Start a choice here; raises Unavailable if the stream is down."""
        if not self.open:
            raise session_lost()
        choice.session = self
        self.choices[choice.handle] = choice
        self.detokenizer.open(choice)
        submit = self._out.submit.add(handle=choice.handle)
        submit.context.CopyFrom(context_to_pb(choice.context))
        submit.sequence.CopyFrom(sequence_to_pb(choice.sequence))
        self._wake.set()

    def abort(self, choice: Choice) -> None:
        """Stop a choice here and at the tokenizer; nothing more is heard of it. Idempotent."""
        if self.choices.pop(choice.handle, None) is not None:
            self.detokenizer.close(choice.handle)
            self._abort(choice.handle)

    async def run(self, opened: Callable[[], None]) -> None:
        """One life of the stream, until it breaks (raises grpc.RpcError) or the scheduler ends it."""
        self._out, self._aborts, self._wake = sb.SessionRequest(), [], asyncio.Event()
        call = self._stub.Session(self._outgoing(self._wake))
        try:
            async for message in call:
                if message.HasField("welcome"):
                    self.open = True
                    opened()
                self._step(message)
        finally:
            self.open = False
            call.cancel()
            self._lose()

    def abandon(self) -> None:
        """Nobody will serve what is left here: it fails."""
        for choice in self.choices.values():
            choice.fail(session_lost())
        self.choices.clear()

    async def _outgoing(self, wake: asyncio.Event) -> AsyncIterator[sb.SessionRequest]:
        """`wake` is this life's own: what is left of an earlier stream cannot take its messages."""
        hello = sb.SessionHello(protocol_version=PROTOCOL_VERSION, router_id=self._router_id)
        yield sb.SessionRequest(hello=hello)
        while True:
            await wake.wait()
            wake.clear()
            message, self._out = self._out, sb.SessionRequest()
            if self._aborts:
                message.abort = pack_i32(self._aborts)
                self._aborts = []
            yield message

    def _step(self, message: sb.SessionResponse) -> None:
        apply_events(message, self.choices)
        if message.handle:
            apply_rows(message, self.choices, time.monotonic_ns())
            self.detokenizer.rows(message.handle, message.count, message.token, message.finish)
        for failed in message.failed:
            choice = self.choices.pop(failed.handle, None)
            if choice is not None:
                self.detokenizer.close(failed.handle)
                choice.fail(errors.from_message(failed.error))

    def _text_ended(self, choice: Choice) -> None:
        """The tokenizer found a stop string, or failed, before the engine ended: the rest is not wanted."""
        self._abort(choice.handle)

    def _abort(self, handle: int) -> None:
        if self.open:
            self._aborts.append(handle)
            self._wake.set()

    def _lose(self) -> None:
        """What has all its tokens still ends well; the rest has lost its engine."""
        lost = [choice for choice in self.choices.values() if not choice.finish]
        for choice in lost:
            del self.choices[choice.handle]
            self.detokenizer.close(choice.handle)
            choice.fail(session_lost())
        if lost:
            log.warning("session lost", instance=self.instance, sequences=len(lost))


def session_lost() -> Unavailable:
    """The error of a request whose scheduler went away."""
    return Unavailable(
        "SCHEDULER_LOST",
        "The engine that ran this request went away.",
        "Retry the request; see the router's log for the instance.",
        retry_after_s=_RETRY_AFTER_S,
    )
