"""Disaggregated prefill and decode over real gRPC, with fake workers behind the schedulers."""

from __future__ import annotations

import grpc
import pytest

from quire.v1 import scheduler_pb2
from quire_common.errors import from_rpc_error
from quire_common.ticket import ticket_from_pb
from tests.fakes.fake_worker import undisturbed
from tests.fakes.scheduler_rig import a_sequence
from tests.fakes.scheduler_stack import Router, Stack, stack

PREFILL = scheduler_pb2.KvTransfer(prefill_only=True)


async def ticket_of(s: Stack, transfer_id: bytes) -> scheduler_pb2.Ticket:
    response = await s.stub.GetTicket(scheduler_pb2.GetTicketRequest(transfer_id=transfer_id))
    ticket: scheduler_pb2.Ticket = response.ticket
    return ticket


async def test_a_prefill_answers_with_a_ticket_and_a_token() -> None:
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


async def test_the_end_of_a_session_ends_its_transfers_but_those_with_a_lease_of_their_own() -> None:
    async with stack(name=b"prefill") as s:
        router = Router(s)
        await router.open()
        await router.submit({1: a_sequence(14, 8)}, PREFILL)
        await router.submit({2: a_sequence(9, 1)}, scheduler_pb2.KvTransfer(prefill_only=True, lease_ms=300))
        await router.until(lambda: 1 in router.prefilled and 2 in router.finished)
        router.cancel()
        await s.until(lambda: s.core.load().open_transfers == 1)
        kept = router.admitted[2].ticket
        assert await ticket_of(s, kept.transfer_id) == kept
        await s.until_quiet()
        assert s.core.stats.transfers == {"released": 1, "expired": 1}
