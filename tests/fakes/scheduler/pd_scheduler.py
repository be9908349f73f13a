"""A scheduler that prefills for others and decodes what others prefilled, as the contract has it, without any pages.

What it "pulls" is nothing: `tickets` has what was handed to it, `transfers` what it lends, each until it is released.
"""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass, field
from typing import Any

import grpc

from quire.v1 import common_pb2
from quire.v1 import scheduler_pb2 as pb
from quire_common.columns import i32
from quire_common.credit.hello import Epoch, KvGroup, PageGeometry, RankAddress
from quire_common.ticket import Ticket, ticket_to_pb
from tests.fakes.router.fake_pages import NAMESPACE
from tests.fakes.scheduler.fake_scheduler import PAGE_SIZE, FakeScheduler, Life

GEOMETRY = PageGeometry(PAGE_SIZE, (KvGroup("full", 1, "l", "f32", 1, 1, 1),), NAMESPACE)
LEASE_MS = 30_000


@dataclass
class KeptRequest:
    """A request that waits for its handover."""

    submit: pb.Submit
    life: Life
    tickets: list[pb.Ticket] = field(default_factory=list)


class PdScheduler(FakeScheduler):
    """`mute`: prefills are admitted without a ticket. `pulling`: pulls end as soon as they may. `wrong`: why they do
    not bring all. `told` are handovers, in order."""

    def __init__(self, *, role: str = "both", lease_ms: int = LEASE_MS, **options: Any) -> None:
        super().__init__(role=role, **options)
        self.lease_ms = lease_ms
        self.mute = False
        self.pulling = True
        self.wrong: common_pb2.RequestError | None = None
        self.kept: dict[int, KeptRequest] = {}
        self.told: list[pb.Handover] = []
        self.transfers: dict[bytes, pb.Ticket] = {}
        # Of transfers that end with their session.
        self._owners: dict[bytes, Life] = {}
        self.released: list[bytes] = []
        self.renewed: list[bytes] = []
        self.pulled: list[int] = []
        self.tickets_asked = 0
        self.answers_tickets = asyncio.Event()
        self.answers_tickets.set()

    @property
    def prefills(self) -> list[pb.Submit]:
        return [submit for submit in self.submits if submit.transfer.prefill_only]

    @property
    def reservations(self) -> list[pb.Submit]:
        return [submit for submit in self.submits if submit.transfer.await_handover]

    def begin(self, submit: pb.Submit, life: Life) -> None:
        if submit.transfer.await_handover:
            self.kept[submit.handle] = KeptRequest(submit, life)
            return
        super().begin(submit, life)
        if submit.transfer.HasField("ticket"):
            self._pull(submit.handle, submit.transfer.ticket, life)
        if submit.transfer.prefill_only:
            life.runs[submit.handle].admitted = True
            admitted = pb.Admitted(
                handle=submit.handle, attempt=submit.context.attempt, cached_tokens=self.cached_tokens
            )
            if not self.mute:
                admitted.ticket.CopyFrom(self.lend(submit))
                if not submit.transfer.lease_ms:
                    self._owners[admitted.ticket.transfer_id] = life
            life.said.append(pb.SessionResponse(admitted=[admitted]))

    def admit_again(self) -> None:
        """What lost its slot is admitted anew, under the same ticket."""
        for life in self._lives:
            for handle, run in life.runs.items():
                if run.submit.transfer.prefill_only:
                    admitted = pb.Admitted(handle=handle, attempt=run.submit.context.attempt)
                    admitted.ticket.CopyFrom(self.transfers[transfer_name(run.submit)])
                    life.said.append(pb.SessionResponse(admitted=[admitted]))
            life.woken.set()

    def lend(self, submit: pb.Submit) -> pb.Ticket:
        """A ticket of all that is known of the sequence."""
        known = (len(submit.sequence.inputs[0].token_ids) + len(submit.sequence.output_ids)) // 4
        full, tail = divmod(known, PAGE_SIZE)
        name = hashlib.sha256(transfer_name(submit)).digest()
        ticket = Ticket(
            transfer_id=transfer_name(submit),
            instance="fake",
            epoch=Epoch(1, 1),
            page_hashes=tuple(hashlib.sha256(name + bytes([i % 256])).digest() for i in range(full)),
            tail_handle=name if tail else b"",
            tail_tokens=tail,
            lease_key=b"k" * 32,
            sources=(RankAddress(0, "tcp", b"127.0.0.1:9"),),
            geometry=GEOMETRY,
            lease_ms=submit.transfer.lease_ms or self.lease_ms,
        )
        self.transfers[ticket.transfer_id] = ticket_to_pb(ticket)
        return self.transfers[ticket.transfer_id]

    def other(self, request: pb.SessionRequest, life: Life) -> None:
        for handover in request.handover:
            self.told.append(handover)
            self._hand_over(handover, life)
        self.renewed += request.renew_transfer
        for transfer_id in request.release_transfer:
            self.released.append(transfer_id)
            self.transfers.pop(transfer_id, None)
        for handle in i32(request.abort).tolist():
            self.kept.pop(handle, None)

    def _hand_over(self, handover: pb.Handover, life: Life) -> None:
        kept = self.kept.get(handover.handle)
        if kept is None:
            return
        if handover.HasField("ticket"):
            kept.tickets.append(handover.ticket)
            self._pull(handover.handle, handover.ticket, life)
        if handover.token or handover.give_up:
            del self.kept[handover.handle]
            super().begin(kept.submit, life)
            life.runs[handover.handle].sent += len(handover.token) // 4

    def _pull(self, handle: int, ticket: pb.Ticket, life: Life) -> None:
        if self.pulling:
            pages = len(ticket.page_hashes) + bool(ticket.tail_tokens)
            told = pb.Pulled(handle=handle, pages=pages, wanted_pages=pages, us=1234)
            if self.wrong is not None:
                told.error.CopyFrom(self.wrong)
            self.pulled.append(handle)
            life.said.append(pb.SessionResponse(pulled=[told]))

    def stepped(self, message: pb.SessionResponse, life: Life) -> None:
        """What is prefill only ends with its first token, unless the token is the last."""
        for handle in i32(message.handle).tolist():
            run = life.runs.get(handle)
            if run is not None and run.submit.transfer.prefill_only:
                del life.runs[handle]
                del self.running[handle]
                note = message.prefilled.add(handle=handle)
                note.timings.add(service="worker", phase="prefill", us=77, count=1)

    def session_over(self, life: Life) -> None:
        super().session_over(life)
        self.kept = {handle: kept for handle, kept in self.kept.items() if kept.life is not life}
        for transfer_id in [transfer_id for transfer_id, its in self._owners.items() if its is life]:
            del self._owners[transfer_id]
            self.transfers.pop(transfer_id, None)

    def fail_kept(self, code: str, grpc_code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE) -> None:
        """All places that are kept here are lost."""
        for handle, kept in list(self.kept.items()):
            error = common_pb2.RequestError(code=code, message="m", fix="f", grpc_code=grpc_code.value[0])
            kept.life.failed.append(pb.Failed(handle=handle, error=error))
            kept.life.woken.set()
            del self.kept[handle]

    async def GetTicket(self, request: pb.GetTicketRequest, context: Any) -> pb.GetTicketResponse:
        self.tickets_asked += 1
        await self.answers_tickets.wait()
        ticket = self.transfers.get(request.transfer_id)
        if ticket is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such transfer")
        return pb.GetTicketResponse(ticket=ticket)


def transfer_name(submit: pb.Submit) -> bytes:
    return hashlib.sha256(str(submit.handle).encode()).digest()[:16]
