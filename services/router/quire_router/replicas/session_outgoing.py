"""The send queue of one Session stream to a scheduler: submits, aborts, handovers, and transfers to renew or release.
Messages are built only when gRPC takes them.

The queue needs no bound of its own, because each admitted sequence waits in it once. A sequence that is aborted before
its submit was sent is never sent. Messages are small, so that building or reading submits never blocks an event loop
for long, neither the router's nor the scheduler's.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING, Protocol

from quire.v1 import scheduler_pb2 as sb
from quire_common.columns import pack_i32
from quire_common.credit.hello import PROTOCOL_VERSION
from quire_common.errors import internal_error
from quire_common.sequence import context_to_pb, sequence_to_pb
from quire_common.telemetry.logs import get_logger
from quire_common.ticket import ticket_to_pb

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from quire_common.errors import QuireError
    from quire_common.sequence import RequestContext
    from quire_common.sequence import Sequence as TokenSequence
    from quire_common.ticket import KvTransfer, Ticket

# A message of this size takes about 2 ms of the router's event loop, and 5 ms of the scheduler's, which also checks the
# values. A larger submit has a message of its own.
MAX_BYTES = 256 * 1024
_MAX_SUBMITS = 64
# The cost of an entry of a map or list beside its size, in bytes, because such entries are added one by one.
_ENTRY_BYTES = 64
log = get_logger(__name__)


class Submission(Protocol):
    """A sequence, or a reservation of a place for one."""

    context: RequestContext

    @property
    def held_tokens(self) -> int | None:
        """The number of leading tokens whose pages some engine or kvstore has; None: not known."""

    def to_submit(self) -> TokenSequence:
        """Return all that the engine must know of the sequence."""

    def kv_transfer(self) -> KvTransfer | None:
        """Return the KV transfer that the engine must know of; None where no pages are transferred."""

    def fail(self, error: QuireError) -> None:
        """Fail the sequence, since no message can be made of it."""


class SessionOutgoing:
    """The queue of one stream; the next stream has a new queue. `wanted` says whether a handle is still in the
    session's tables."""

    def __init__(self, router_id: str, wanted: Callable[[int], bool]) -> None:
        self._router_id = router_id
        self._wanted = wanted
        self._submits: deque[tuple[int, Submission]] = deque()
        self._handovers: deque[tuple[int, Ticket | None, bytes, bool]] = deque()
        self._aborts: list[int] = []
        self._renewed: list[bytes] = []
        self._released: list[bytes] = []
        self._wake = asyncio.Event()
        self._over = False

    def submit(self, handle: int, submission: Submission) -> None:
        """Queue a sequence or a reservation, to be started at the scheduler."""
        self._submits.append((handle, submission))
        self._wake.set()

    def hand_over(self, handle: int, ticket: Ticket | None, token: bytes, *, give_up: bool) -> None:
        """Queue what the prefill side gives to the reservation `handle`: a ticket for its pages, or sampled tokens
        (int32 bytes). `give_up`: there is nothing more to pull."""
        self._handovers.append((handle, ticket, token, give_up))
        self._wake.set()

    def abort(self, handle: int) -> None:
        """Queue the abort of a handle."""
        self._aborts.append(handle)
        self._wake.set()

    def renew_transfers(self, transfer_ids: Sequence[bytes]) -> None:
        """Queue the renewal of these transfers' leases."""
        self._renewed += transfer_ids
        self._wake.set()

    def release_transfer(self, transfer_id: bytes) -> None:
        """Queue the release of a transfer."""
        self._released.append(transfer_id)
        self._wake.set()

    def end(self) -> None:
        """End `messages`, because the stream has ended. Without this call, gRPC would leave the generator waiting after
        the scheduler has ended the stream."""
        self._over = True
        self._wake.set()

    async def messages(self) -> AsyncIterator[sb.SessionRequest]:
        """Yield the stream's requests: a hello with the protocol version and the router's id, then whatever is queued,
        until `end` is called. Waits while nothing is queued."""
        yield sb.SessionRequest(hello=sb.SessionHello(protocol_version=PROTOCOL_VERSION, router_id=self._router_id))
        while True:
            await self._wake.wait()
            if self._over:
                return
            self._wake.clear()
            while self._submits or self._aborts or self._handovers or self._renewed or self._released:
                yield self._next()

    def _next(self) -> sb.SessionRequest:
        """Make the next message. Submits are added until there are 64 or until the message reaches 256 KiB, which the
        last one may exceed; then, below this size, handovers if no submit is left; then all aborts, renewals and
        releases. Submits and handovers whose handles are no longer in the session's tables are left out, so the message
        may be empty. If a submit cannot be made, this is logged, and only this submission fails."""
        message, size = sb.SessionRequest(), 0
        while self._submits and size < MAX_BYTES and len(message.submit) < _MAX_SUBMITS:
            handle, submission = self._submits.popleft()
            if not self._wanted(handle):
                continue
            try:
                message.submit.append(_submit_to_pb(handle, submission))
            except Exception:
                # One bad request must not end the stream of all.
                log.exception("a submit could not be made", request_id=submission.context.request_id)
                submission.fail(internal_error())
                continue
            size += _cost(message.submit[-1])
        # A handover must not overtake its handle's submit. Its ticket names every page of a prompt.
        while not self._submits and self._handovers and size < MAX_BYTES:
            one = self._handovers.popleft()
            if self._wanted(one[0]):
                message.handover.append(_handover_to_pb(*one))
                size += message.handover[-1].ByteSize()
        if self._aborts:
            message.abort = pack_i32(self._aborts)
            self._aborts = []
        message.renew_transfer.extend(self._renewed)
        message.release_transfer.extend(self._released)
        self._renewed, self._released = [], []
        return message


def _cost(submit: sb.Submit) -> int:
    """Return the cost of a submit in bytes: its size, and 64 for each logit bias and each bad word."""
    sampling = submit.sequence.sampling
    return int(submit.ByteSize()) + _ENTRY_BYTES * (len(sampling.logit_bias) + len(sampling.bad_words_ids))


def _submit_to_pb(handle: int, submission: Submission) -> sb.Submit:
    """Convert a submission to a message, with its held tokens and its KV transfer, if it has them."""
    message = sb.Submit(
        handle=handle,
        context=context_to_pb(submission.context),
        sequence=sequence_to_pb(submission.to_submit()),
    )
    if submission.held_tokens is not None:
        message.held_tokens = submission.held_tokens
    transfer = submission.kv_transfer()
    if transfer is not None:
        message.transfer.prefill_only = transfer.prefill_only
        message.transfer.await_handover = transfer.await_handover
        message.transfer.lease_ms = transfer.lease_ms
        if transfer.ticket is not None:
            message.transfer.ticket.CopyFrom(ticket_to_pb(transfer.ticket))
    return message


def _handover_to_pb(handle: int, ticket: Ticket | None, token: bytes, give_up: bool) -> sb.Handover:
    """Convert a handover to a decode side: the ticket of the pages (None: not in this message), and int32 bytes of
    sampled tokens. `give_up`: there are no pages to pull."""
    message = sb.Handover(handle=handle, token=token, give_up=give_up)
    if ticket is not None:
        message.ticket.CopyFrom(ticket_to_pb(ticket))
    return message
