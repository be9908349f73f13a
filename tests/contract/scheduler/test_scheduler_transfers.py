"""Disaggregated prefill and decode over real gRPC, with fake workers behind the schedulers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import numpy as np
import pytest

from quire.v1 import common_pb2, scheduler_pb2
from quire_common.columns import pack_i32
from quire_common.credit import PageGeometry
from quire_common.credit.hello import geometry_from_pb
from quire_common.errors import from_rpc_error
from quire_common.ticket import compatibility_digest, ticket_from_pb
from tests.fakes.scheduler.scheduler_rig import a_sequence
from tests.fakes.scheduler.scheduler_stack import Router, Stack, stack
from tests.fakes.worker.fake_worker import FakeWorker, undisturbed
from tests.fakes.worker.fake_worker_service import FakeWorkerService

PREFILL = scheduler_pb2.KvTransfer(prefill_only=True)
DECODE = scheduler_pb2.KvTransfer(await_handover=True)


@asynccontextmanager
async def both_sides() -> AsyncIterator[tuple[Stack, Stack]]:
    """A prefill side and a decode side whose workers find each other."""
    peers: dict[bytes, FakeWorker] = {}

    def share(service: FakeWorkerService) -> None:
        service.peers = peers

    async with stack(name=b"prefill", prepare=share) as prefill, stack(name=b"decode", prepare=share) as decode:
        yield prefill, decode


def geometry_of(ticket: scheduler_pb2.Ticket) -> PageGeometry:
    pages = ticket.compatibility
    return geometry_from_pb(
        common_pb2.PageGeometry(page_size=pages.page_size, groups=pages.groups, namespace=pages.namespace)
    )


async def opened(s: Stack) -> Router:
    router = Router(s)
    await router.open()
    return router


async def ticket_of(s: Stack, transfer_id: bytes) -> scheduler_pb2.Ticket:
    response = await s.stub.GetTicket(scheduler_pb2.GetTicketRequest(transfer_id=transfer_id))
    ticket: scheduler_pb2.Ticket = response.ticket
    return ticket


async def test_prefill_only_request_returns_a_ticket_and_a_token() -> None:
    async with stack(name=b"prefill") as s:
        router = Router(s)
        welcome = await router.open()
        await router.submit({1: a_sequence(14, 8)}, PREFILL)
        await router.until(lambda: 1 in router.prefilled)
        assert router.tokens[1] == undisturbed(a_sequence(14, 8))[0][:1] and not router.finish
        assert {(t.service, t.phase) for t in router.prefilled[1].timings} >= {("worker", "prefill")}
        message = router.admitted[1].ticket
        ticket = ticket_from_pb(message)
        assert (ticket.instance, ticket.tokens(), ticket.lease_ms) == ("scheduler-test", 14, 10_000)
        assert message.epoch == welcome.epoch and ticket.geometry == s.worker.hello.model.pages
        assert await ticket_of(s, ticket.transfer_id) == message
        load = await anext(aiter(s.stub.WatchLoad(scheduler_pb2.WatchLoadRequest())))
        assert load.open_transfers == 1
        await router.send(renew_transfer=[ticket.transfer_id, b"unknown"])
        await router.send(release_transfer=[ticket.transfer_id, b"unknown"])
        await s.until_quiet()
        with pytest.raises(grpc.RpcError) as caught:
            await ticket_of(s, ticket.transfer_id)
        error = from_rpc_error(caught.value)
        assert (error.code, error.http_status) == ("TRANSFER_UNKNOWN", 404)


async def test_ended_session_keeps_only_transfers_with_a_clients_lease() -> None:
    async with stack(name=b"prefill") as s:
        router = Router(s)
        await router.open()
        await router.submit({1: a_sequence(14, 8)}, PREFILL)
        await router.submit({2: a_sequence(9, 1)}, scheduler_pb2.KvTransfer(prefill_only=True, lease_ms=2000))
        await router.until(lambda: 1 in router.prefilled and 2 in router.finished)
        router.cancel()
        await s.until(lambda: s.core.load().open_transfers == 1)
        kept = router.admitted[2].ticket
        assert await ticket_of(s, kept.transfer_id) == kept
        await s.until_quiet()
        assert s.core.stats.transfers == {"released": 1, "expired": 1}


async def test_half_closed_session_awaits_no_handover() -> None:
    async with stack() as s:
        router = Router(s)
        await router.open()
        await router.submit({1: a_sequence(14, 8)}, DECODE)
        await router.half_close()
        assert router.tokens[1] == undisturbed(a_sequence(14, 8))[0]
        await s.until_quiet()


async def test_handover_moves_a_request_with_its_pages() -> None:
    async with both_sides() as (prefill, decode):
        here, there = await opened(prefill), await opened(decode)
        sequence = a_sequence(14, 8)
        await there.submit({7: sequence}, DECODE)
        await here.submit({1: sequence}, PREFILL)
        await here.until(lambda: 1 in here.admitted)
        ticket = here.admitted[1].ticket
        await there.send(handover=[scheduler_pb2.Handover(handle=7, ticket=ticket)])
        await here.until(lambda: 1 in here.prefilled)
        await there.until(lambda: 7 in there.pulled)
        assert 7 not in there.admitted, "it does not run before its token"
        await there.send(handover=[scheduler_pb2.Handover(handle=7, token=pack_i32(here.tokens[1]))])
        await there.done(7)
        assert here.tokens[1] + there.tokens[7] == undisturbed(sequence)[0]
        assert there.finish[7] == common_pb2.FINISH_REASON_LENGTH
        pulled = there.pulled[7]
        assert (pulled.pages, pulled.wanted_pages, pulled.HasField("error")) == (4, 4, False)
        phases = {(t.service, t.phase): t.count for t in there.finished[7].timings}
        assert phases["worker", "pull"] == 4 and phases["worker", "prefill"] == 1
        load = await anext(aiter(decode.stub.WatchLoad(scheduler_pb2.WatchLoadRequest())))
        assert load.pull_bytes_per_s > 0
        await prefill.until_quiet()
        await decode.until_quiet()


async def test_submission_with_a_ticket_pulls_its_pages() -> None:
    async with both_sides() as (prefill, decode):
        here, there = await opened(prefill), await opened(decode)
        await here.submit({1: a_sequence(14, 8)}, PREFILL)
        await here.until(lambda: 1 in here.prefilled)
        resumed = a_sequence(14, 8, output_ids=np.array(here.tokens[1], np.int32))
        await there.submit({2: resumed}, scheduler_pb2.KvTransfer(ticket=here.admitted[1].ticket))
        await there.done(2)
        assert here.tokens[1] + there.tokens[2] == undisturbed(a_sequence(14, 8))[0]
        assert there.pulled[2].pages == 4 and there.admitted[2].cached_tokens == 14
        await prefill.until_quiet()


async def test_useless_tickets_are_reported_and_the_request_runs() -> None:
    async with both_sides() as (prefill, decode):
        here, there = await opened(prefill), await opened(decode)
        await here.submit({1: a_sequence(14, 8)}, PREFILL)
        await here.until(lambda: 1 in here.prefilled)
        token = pack_i32(here.tokens[1])
        torn, foreign = (scheduler_pb2.Ticket.FromString(here.admitted[1].ticket.SerializeToString()) for _ in "12")
        torn.tail_tokens = 77
        foreign.compatibility.groups[0].dtype = "bfloat16"
        foreign.compatibility_digest = compatibility_digest(geometry_of(foreign))
        await there.submit({1: a_sequence(14, 8), 2: a_sequence(14, 8)}, DECODE)
        handovers = [
            scheduler_pb2.Handover(handle=1, ticket=torn, token=token),
            scheduler_pb2.Handover(handle=2, ticket=foreign, token=token),
        ]
        await there.send(handover=handovers)
        await there.submit({3: a_sequence(14, 8)}, scheduler_pb2.KvTransfer(ticket=torn))
        await there.done(1, 2, 3)
        assert {handle: note.error.code for handle, note in there.pulled.items()} == {
            1: "BAD_TICKET",
            2: "INCOMPATIBLE_PAGES",
            3: "BAD_TICKET",
        }
        assert "groups[0].dtype" in there.pulled[2].error.message
        assert there.tokens[1] == there.tokens[2] == undisturbed(a_sequence(14, 8))[0][1:]
        assert there.tokens[3] == undisturbed(a_sequence(14, 8))[0]


async def test_give_up_abort_and_cancelled_session_leave_nothing() -> None:
    async with both_sides() as (_, decode):
        there = await opened(decode)
        await there.submit({1: a_sequence(9, 4), 2: a_sequence(9, 4), 3: a_sequence(9, 4)}, DECODE)
        await there.send(handover=[scheduler_pb2.Handover(handle=1, give_up=True)])
        await there.abort(2)
        await there.done(1, 2)
        assert there.tokens[1] == undisturbed(a_sequence(9, 4))[0]
        assert there.finish[2] == common_pb2.FINISH_REASON_ABORT and decode.core.load().waiting == 1
        there.cancel()
        await decode.until_quiet()


async def test_request_with_both_roles_is_refused() -> None:
    async with stack() as s:
        router = await opened(s)
        await router.submit({1: a_sequence(9, 4)}, scheduler_pb2.KvTransfer(prefill_only=True, await_handover=True))
        await router.done(1)
        assert router.failed[1].code == "BAD_TRANSFER"
