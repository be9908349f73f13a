"""Session: one router's Session stream. Submits and aborts come in; the outputs of steps go out through a bounded
queue.

A router that keeps up gets a message for each step. If a step's message still waits in the queue, the next step is
joined to it, so that a router that falls behind has fewer messages to read. A large step is split into several
messages. If the queue is full, the session is ended; but if a step with prompt logprobs finds no room, the requests
that these belong to fail first, and the session goes on if there is room for the rest. When the stream ends, the
requests of the session are aborted. A session that has nothing to send sends empty messages, so that its router can
tell silence from death.
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
# The most bytes of a message that several steps are joined in, whatever the queue may hold. gRPC carries 64 MiB.
MOST_JOINED_BYTES = 8 * 1024 * 1024
# A heartbeat is sent after less than HEARTBEAT_MS of silence, since the engine calls `beat` only every 0.1 s.
_QUIET_S = 0.35
# The longest time that submits of one message are handled before other tasks may run.
_TURN_S = 0.005


class Session:
    """The engine's OutputSink for one stream."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._waiting: deque[scheduler_pb2.SessionResponse | None] = deque()
        self._wake = asyncio.Event()
        # The outputs in the last waiting message, if more outputs may be joined to it.
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
        """Open a session by the stream's first message, and yield messages for the router, the welcome first, until it
        wants no more and all its requests have ended; nothing if the stream ends without a message. Raises the error
        that ends the session, such as FailedPrecondition for a wrong first message; messages that wait are dropped
        then. Requests that still run at the end are aborted."""
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
        """Queue a step's outputs for the router. Returns False if the session has ended by an error, or ends by one now
        because the queue is full. If the router sends no more, the session ends normally once its last request has
        ended."""
        if not self._take_step(outputs):
            return False
        if self._half_closed:
            # The check runs after everything that this session must be told now has been delivered.
            asyncio.get_running_loop().call_soon(self._end_if_done)
        return True

    def beat(self) -> None:
        """Queue an empty message if nothing waits in the queue and nothing was queued for 0.35 s, so that the router
        can tell silence from death."""
        if not self._waiting and asyncio.get_running_loop().time() - self._said_s >= _QUIET_S:
            self._put(scheduler_pb2.SessionResponse())

    async def _read(
        self, first: scheduler_pb2.SessionRequest, requests: AsyncIterator[scheduler_pb2.SessionRequest]
    ) -> None:
        """Handle the router's messages until it closes its side. Then its requests go on without the handovers that
        they await, and the session ends when they have ended. An error ends the session at once. Once the session has
        ended by an error, no further message is handled."""
        try:
            await self._apply(first)
            async for message in requests:
                if self._error is not None:
                    return  # `run` raises the error once the router reads
                await self._apply(message)
                # Now the worker's link can send the Grant for this message, before the session reads the next message.
                await asyncio.sleep(0)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            if not isinstance(error, QuireError):
                log.exception("session broke")
            self._end(as_quire_error(error))
        else:
            # The router submits and hands over nothing more; its requests may finish.
            self._half_closed = True
            self._engine.end_handovers(self._number)
            self._end_if_done()

    async def _apply(self, message: scheduler_pb2.SessionRequest) -> None:
        """Carry out one message: submits, handovers, aborts, and transfers to renew or release. A refused submit is
        answered by a failed note; if that finds no room, the session ends. After each 5 ms of submits, other tasks may
        run. Once the session has ended by an error, the rest of the message is dropped. Raises InvalidArgument for a
        handover or abort whose column is not of int32."""
        clock = asyncio.get_running_loop().time
        turn_s = clock() + _TURN_S
        for submit in message.submit:
            if clock() > turn_s:
                # Submits with many control values or tokens take milliseconds each, so steps go on in between.
                await asyncio.sleep(0)
                if self._error is not None:
                    return
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
        """Wait for the next message in the queue and remove it; None: the session has ended."""
        while not self._waiting:
            self._wake.clear()
            await self._wake.wait()
        return self._waiting.popleft()

    def _take_step(self, outputs: SessionOutputs) -> bool:
        """Queue a step's outputs for the router, joined to the last waiting message if possible, else as new messages.
        If outputs with prompt logprobs find no room, their requests fail, and the rest is queued. Returns False if
        there is no room for the rest either: then the router reads too slowly, and the session ends. False too if the
        session has ended by an error before."""
        pieces, messages = [outputs], [outputs_to_pb(outputs)]  # nearly every step is one message
        if messages[0].ByteSize() > PIECE_BYTES:
            pieces = split_outputs(outputs, PIECE_BYTES)
            messages = list(map(outputs_to_pb, pieces))
        elif self._waiting and self._join_last_message(outputs, messages[0]):
            return True
        if outputs.prompt_logprobs and not self._has_room(messages):
            # The router may read as fast as it can: the requests ask for too much.
            return self._take_step(self._without_prompt_logprobs(outputs))
        if not self._put(*messages):
            return False
        self._last = pieces[-1]
        return True

    def _without_prompt_logprobs(self, outputs: SessionOutputs) -> SessionOutputs:
        """Fail the requests whose prompt logprobs are in a step for which the queue has no room, whatever fills the
        queue, and return the rest of the step. If such a request ends in this step, a failed note replaces its rows and
        its finished note."""
        owners = {chunk.owner for chunk in outputs.prompt_logprobs}
        ended = {owner for owner in owners if not self._engine.fail(self._number, owner, _too_large(self._bound_bytes))}
        rest = replace(outputs, prompt_logprobs=[])
        if ended:
            rest = without_handles(rest, ended)
            failed = [FailedNote(owner, _too_large(self._bound_bytes)) for owner in sorted(ended)]
            rest = replace(rest, failed=[*rest.failed, *failed])
        return rest

    def _join_last_message(self, outputs: SessionOutputs, message: scheduler_pb2.SessionResponse) -> bool:
        """Join `outputs`, which `message` encodes, to the last message in the queue. Returns False, and changes
        nothing, if the queue is empty, if its last message is no step's, if the result or the whole queue would have
        too many bytes, or if `join` refuses the two."""
        size = message.ByteSize()
        if not self._waiting or self._last is None or self._bytes + size > self._bound_bytes:
            return False
        into = self._waiting[-1]
        if into is None or (into_size := into.ByteSize()) + size > MOST_JOINED_BYTES:
            return False
        joined = join(self._last, outputs)
        if joined is None:
            return False
        self._bytes -= into_size
        into.MergeFrom(message)  # notes go behind notes; columns are put anew
        put_columns(joined, into)
        self._last, self._bytes = joined, self._bytes + into.ByteSize()
        return True

    def _has_room(self, messages: Sequence[scheduler_pb2.SessionResponse]) -> bool:
        """Whether the queue has room for these messages, by the configured number of messages and of bytes. An empty
        queue has room for one step of any size."""
        if not self._waiting:
            return True
        size = sum(message.ByteSize() for message in messages)
        return len(self._waiting) + len(messages) <= self._bound and self._bytes + size <= self._bound_bytes

    def _put(self, *messages: scheduler_pb2.SessionResponse) -> bool:
        """Queue the messages. Returns False if the session has ended before, or if there is no room; lack of room ends
        the session by an Overloaded error."""
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
        """End the session by an error, which `run` raises; messages in the queue are dropped."""
        self._error, self._bytes = error, 0
        self._waiting.clear()
        self._add(None)

    def _end_if_done(self) -> None:
        """End the session normally if the router sends no more and none of its requests is left."""
        if self._half_closed and not self._engine.running(self._number):
            self._add(None)

    def _add(self, message: scheduler_pb2.SessionResponse | None) -> None:
        """Put the message (None: the session's end) at the end of the queue, to which nothing is joined then, and wake
        the stream."""
        self._waiting.append(message)
        self._last = None
        self._wake.set()

    def _welcome(self) -> scheduler_pb2.SessionWelcome:
        """Build the session's first message: the protocol version, the time between heartbeats and, if there is a
        worker, its epoch and capabilities."""
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
