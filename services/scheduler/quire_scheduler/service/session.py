"""One router's Session stream: submits and aborts in, steps out, through a bounded queue.

A router that keeps up has a message for each step. What would wait behind another step joins it, so that a router that
falls behind has fewer to take. A large step is cut into several messages. A session whose router does not read at all
is ended rather than waited for, unless it is a request's prompt logprobs that fill the queue: then that request fails.
When the stream ends, its requests are aborted. A session with nothing to say sends empty messages, so that its router
can tell silence from death.
"""

from __future__ import annotations

import asyncio
from collections import deque
from dataclasses import replace
from typing import TYPE_CHECKING

from quire.v1 import scheduler_pb2
from quire_common.columns import i32
from quire_common.credit.hello import PROTOCOL_VERSION, epoch_to_pb
from quire_common.errors import FailedPrecondition, Overloaded, QuireError, TooLarge, as_quire_error, to_message
from quire_common.sequence import context_from_pb, sequence_from_pb
from quire_common.telemetry.logs import get_logger
from quire_scheduler.core.outputs import FailedNote, without_handles
from quire_scheduler.disaggregation.handover import NO_TRANSFER
from quire_scheduler.service.output_split import PIECE_BYTES, split_outputs
from quire_scheduler.service.row_join import join
from quire_scheduler.service.session_wire import handover_from_pb, outputs_to_pb, put_columns, transfer_from_pb

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from quire_scheduler.core.outputs import SessionOutputs
    from quire_scheduler.service.engine import Engine

log = get_logger(__name__)
HEARTBEAT_MS = 500
# Bytes of one message of steps that wait, whatever the queue may hold. gRPC carries 64 MiB.
MOST_JOINED_BYTES = 8 * 1024 * 1024
# Said to be due a little earlier: the clock that asks ticks by itself.
_QUIET_S = 0.35
# Submits of one message are taken for so long at a stretch.
_TURN_S = 0.005


class Session:
    """An OutputSink of the engine for one stream."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._waiting: deque[scheduler_pb2.SessionResponse | None] = deque()
        self._wake = asyncio.Event()
        # What the last of those says, where more may join it.
        self._last: SessionOutputs | None = None
        self._bound = engine.config.session_queue
        self._bound_bytes = engine.config.session_queue_bytes
        self._bytes = 0
        self._said_s = 0.0
        self._error: QuireError | None = None
        self._half_closed = False
        self._number = 0

    async def run(
        self, requests: AsyncIterator[scheduler_pb2.SessionRequest]
    ) -> AsyncIterator[scheduler_pb2.SessionResponse]:
        """Open a session by the stream's first message, and yield what the router must be told until it wants no more
        and all its requests have ended. Raises the error that ends the session. Requests that still run at the end are
        aborted."""
        first = await anext(requests, None)
        if first is None:
            return
        _check_hello(first)
        self._number = self._engine.open_session(self)
        reader = asyncio.ensure_future(self._read(first, requests))
        try:
            yield scheduler_pb2.SessionResponse(welcome=self._welcome())
            while (message := await self._next()) is not None:
                self._bytes -= message.ByteSize()
                yield message
            if self._error is not None:
                raise self._error
        finally:
            reader.cancel()
            self._engine.close_session(self._number)

    def deliver(self, outputs: SessionOutputs) -> bool:
        """Queue a step's outputs for the router. Returns False where the queue is full; the session ends by an error
        then."""
        if not self._take_step(outputs):
            return False
        if self._half_closed:
            # Once all that this session is to hear now has been delivered.
            asyncio.get_running_loop().call_soon(self._end_if_done)
        return True

    def beat(self) -> None:
        if not self._waiting and asyncio.get_running_loop().time() - self._said_s >= _QUIET_S:
            self._put(scheduler_pb2.SessionResponse())

    async def _read(
        self, first: scheduler_pb2.SessionRequest, requests: AsyncIterator[scheduler_pb2.SessionRequest]
    ) -> None:
        """Apply the router's messages until it closes its side. An error ends the session."""
        try:
            await self._apply(first)
            async for message in requests:
                await self._apply(message)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            if not isinstance(error, QuireError):
                log.exception("session broke")
            self._end(as_quire_error(error))
        else:
            # The router wants nothing more; what runs may finish.
            self._half_closed = True
            self._end_if_done()

    async def _apply(self, message: scheduler_pb2.SessionRequest) -> None:
        """Carry out one message: submits, handovers, aborts, and transfers to renew or release. A refused submit is
        answered by a failed note. Lets other tasks run in between."""
        clock, turn_s = asyncio.get_running_loop().time, asyncio.get_running_loop().time() + _TURN_S
        for submit in message.submit:
            if clock() > turn_s:
                # Submits with many control values or tokens take milliseconds each; steps go on between.
                await asyncio.sleep(0)
                turn_s = clock() + _TURN_S
            try:
                self._submit(submit)
            except QuireError as error:
                refusal = scheduler_pb2.SessionResponse()
                refusal.failed.add(handle=submit.handle, error=to_message(error))
                if not self._put(refusal):
                    return
        for handover in message.handover:
            self._engine.hand_over(self._number, handover.handle, handover_from_pb(handover))
        if message.abort:
            self._engine.abort(self._number, i32(message.abort, "abort").tolist())
        self._engine.keep_transfers(message.renew_transfer, message.release_transfer)

    def _submit(self, submit: scheduler_pb2.Submit) -> None:
        """Decode a submit and pass it to the engine. Raises the QuireError that refuses it."""
        self._engine.submit(
            self._number,
            submit.handle,
            context_from_pb(submit.context),
            sequence_from_pb(submit.sequence),
            transfer_from_pb(submit.transfer) if submit.HasField("transfer") else NO_TRANSFER,
            submit.held_tokens if submit.HasField("held_tokens") else None,
        )

    async def _next(self) -> scheduler_pb2.SessionResponse | None:
        while not self._waiting:
            self._wake.clear()
            await self._wake.wait()
        return self._waiting.popleft()

    def _take_step(self, outputs: SessionOutputs) -> bool:
        """Queue a step's outputs for the router: joined to the last waiting message if possible, else as new messages.
        Outputs with prompt logprobs that find no room are queued without these, whose requests fail instead. Returns
        False where even so there is no room: the router reads too slowly, and the session ends."""
        pieces = split_outputs(outputs, PIECE_BYTES)
        messages = list(map(outputs_to_pb, pieces))
        if len(messages) == 1 and self._join_last_message(outputs, messages[0]):
            return True
        if not self._has_room(messages) and outputs.prompt_logprobs:
            # The router may read as fast as it can: it is the requests that ask for too much.
            return self._take_step(self._without_prompt_logprobs(outputs))
        if not self._put(*messages):
            return False
        self._last = pieces[-1]
        return True

    def _without_prompt_logprobs(self, outputs: SessionOutputs) -> SessionOutputs:
        """Fail the requests whose prompt logprobs the step brings, for their size, and return the rest of the step.
        Where such a request ends in this step, a failed note takes the place of its rows and finished note."""
        owners = {chunk.owner for chunk in outputs.prompt_logprobs}
        ended = {owner for owner in owners if not self._engine.fail(self._number, owner, _too_large(self._bound_bytes))}
        rest = replace(outputs, prompt_logprobs=[])
        if ended:
            rest = without_handles(rest, ended)
            failed = [FailedNote(owner, _too_large(self._bound_bytes)) for owner in sorted(ended)]
            rest = replace(rest, failed=[*rest.failed, *failed])
        return rest

    def _join_last_message(self, outputs: SessionOutputs, message: scheduler_pb2.SessionResponse) -> bool:
        """Join `outputs`, whose wire form is `message`, to the last message in the queue. Returns False, and changes
        nothing, where they cannot be joined."""
        if not self._waiting or self._last is None or self._bytes + message.ByteSize() > self._bound_bytes:
            return False
        into = self._waiting[-1]
        if into is None or into.ByteSize() + message.ByteSize() > MOST_JOINED_BYTES:
            return False
        joined = join(self._last, outputs)
        if joined is None:
            return False
        self._bytes -= into.ByteSize()
        into.MergeFrom(message)  # notes go behind notes; columns are put anew
        put_columns(joined, into)
        self._last, self._bytes = joined, self._bytes + into.ByteSize()
        return True

    def _has_room(self, messages: Sequence[scheduler_pb2.SessionResponse]) -> bool:
        """Whether the queue takes these messages. An empty queue takes one step, however large."""
        if not self._waiting:
            return True
        size = sum(message.ByteSize() for message in messages)
        return len(self._waiting) + len(messages) <= self._bound and self._bytes + size <= self._bound_bytes

    def _put(self, *messages: scheduler_pb2.SessionResponse) -> bool:
        """Queue the messages. Returns False where they have no room, which ends the session, or where it has ended
        before."""
        if self._error is not None:
            return False
        if self._has_room(messages):
            self._said_s = asyncio.get_running_loop().time()
            for message in messages:
                self._bytes += message.ByteSize()
                self._add(message)
            return True
        self._end(
            Overloaded(
                "SESSION_TOO_SLOW",
                f"{len(self._waiting)} messages of {self._bytes} bytes wait for this session's router.",
                "Read the session faster, or raise --session-queue and --session-queue-bytes.",
            )
        )
        return False

    def _end(self, error: QuireError) -> None:
        """End the session by an error; messages in the queue are dropped."""
        self._error, self._bytes = error, 0
        self._waiting.clear()
        self._add(None)

    def _end_if_done(self) -> None:
        if self._half_closed and not self._engine.running(self._number):
            self._add(None)

    def _add(self, message: scheduler_pb2.SessionResponse | None) -> None:
        self._waiting.append(message)
        self._last = None
        self._wake.set()

    def _welcome(self) -> scheduler_pb2.SessionWelcome:
        """Build the session's first message, with the worker's epoch and capabilities if there is one."""
        welcome = scheduler_pb2.SessionWelcome(protocol_version=PROTOCOL_VERSION, heartbeat_ms=HEARTBEAT_MS)
        if self._engine.core is not None:
            hello = self._engine.core.hello
            welcome.epoch.CopyFrom(epoch_to_pb(hello.epoch))
            welcome.capabilities.extend(hello.model.capabilities)
        return welcome


def _too_large(bound_bytes: int) -> TooLarge:
    """Return the error for a request whose prompt logprobs fill the queue."""
    return TooLarge(
        "PROMPT_LOGPROBS_TOO_LARGE",
        f"The logprobs of this request's prompt fill the {bound_bytes} bytes that may wait for its router.",
        "Ask for fewer alternatives, or send a shorter prompt.",
        param="prompt_logprobs",
    )


def _check_hello(first: scheduler_pb2.SessionRequest) -> None:
    """Raise FailedPrecondition unless the session's first message has a hello of this protocol version."""
    if not first.HasField("hello"):
        raise FailedPrecondition("HELLO_MISSING", "The session's first frame has no hello.", "Send hello first.")
    if first.hello.protocol_version != PROTOCOL_VERSION:
        raise FailedPrecondition(
            "PROTOCOL_VERSION",
            f"The router speaks version {first.hello.protocol_version} of the session, this scheduler "
            f"{PROTOCOL_VERSION}.",
            "Deploy routers and schedulers of one release.",
        )
