"""The prefill side: one token, a ticket, and pages that wait for whoever has it, until the transfer's one end."""

from __future__ import annotations

import numpy as np
import pytest

from quire_common.credit import MoveKind, PageMove
from quire_common.errors import InvalidArgument
from quire_common.finish import FinishReason
from quire_common.pages import chain_hashes
from quire_common.ticket import KvTransfer, Ticket
from quire_scheduler.config import SchedulerConfig
from tests.fakes.scheduler.scheduler_rig import Rig, a_sequence
from tests.fakes.worker.fake_worker import FakeWorker, make_hello, undisturbed, with_address

PREFILL = KvTransfer(prefill_only=True)
LEASE_S = 10.0


def a_rig(config: SchedulerConfig | None = None, **more: int) -> Rig:
    hello = make_hello(**{"page_size": 4, **more})
    return Rig(config, worker=FakeWorker(with_address(hello, b"prefill")))


def exports(rig: Rig) -> list[PageMove]:
    return [move for grant in rig.worker.seen for move in grant.move if move.kind is MoveKind.EXPORT]


def cancelled(rig: Rig) -> list[int]:
    return [move_id for grant in rig.worker.seen for move_id in grant.cancel_move.tolist()]


def prefilled(rig: Rig, tokens: int = 14, transfer: KvTransfer = PREFILL, handle: int = 1) -> Ticket:
    """One request, up to where its pages wait."""
    rig.submit(handle, a_sequence(tokens, 8), transfer=transfer)
    rig.step_until(lambda: (0, handle) in rig.prefilled)
    return rig.tickets[0, handle]


def is_clean(rig: Rig) -> bool:
    """All is given back; by a run that ends only then."""
    rig.run()
    return not rig.worker.moves.exporting


def test_prefill_only_samples_one_token_and_keeps_its_pages() -> None:
    rig = a_rig()
    ticket = prefilled(rig)
    sequence = a_sequence(14, 8)
    assert rig.tokens[0, 1] == undisturbed(sequence)[0][:1]
    assert not rig.ends and not rig.core.busy, "the token's row ends nothing, and the slot is free"
    (start,) = (start for grant in rig.worker.seen for start in grant.start)
    assert start.limit == 14, "its credit ends with what is known"
    (move,) = exports(rig)
    assert (ticket.page_hashes, ticket.tail_tokens) == (tuple(chain_hashes(sequence.prompt_ids, 4)), 2)
    assert (move.hashes, move.tail_tokens, move.lease) == (ticket.handles, 2, ticket.transfer_id)
    assert move.lease_key == ticket.lease_key and len(ticket.lease_key) == 32
    assert move.device_page.tolist() == start.pages[0].tolist()
    assert ticket.sources == rig.worker.hello.data_address
    load = rig.core.load()
    assert (load.open_transfers, load.free_pages) == (1, load.pages - 4) and not rig.core.idle
    rig.core.release([ticket.transfer_id, b"unknown", ticket.transfer_id])
    assert is_clean(rig) and rig.core.stats.transfers == {"released": 1}
    assert rig.core.load().free_pages == load.pages


def test_exported_pages_are_free_only_after_the_export_ended() -> None:
    rig = a_rig(num_pages=5)
    ticket = prefilled(rig)
    rig.step()
    rig.core.release([ticket.transfer_id])
    grant = rig.core.next_grant(rig.now)
    assert grant is not None and grant.cancel_move.tolist() == [exports(rig)[0].id]
    assert rig.core.load().free_pages == 0 and rig.core.ticket(ticket.transfer_id) is None
    rig.worker.deliver(grant)
    assert is_clean(rig) and rig.core.load().free_pages == 4


def test_final_first_token_finishes_a_prefill_only_request() -> None:
    rig = a_rig()
    rig.submit(1, a_sequence(14, 1), transfer=PREFILL)
    stop = undisturbed(a_sequence(9, 8))[0][0]
    rig.submit(2, a_sequence(9, 8, stop_token_ids=(stop,)), transfer=PREFILL)
    assert is_clean(rig)
    assert rig.ends == {(0, 1): FinishReason.LENGTH, (0, 2): FinishReason.STOP}
    assert not rig.prefilled and rig.core.stats.transfers == {"released": 2}


def test_clients_lease_outlives_request_and_session() -> None:
    rig = a_rig()
    rig.submit(1, a_sequence(14, 1), transfer=KvTransfer(prefill_only=True, lease_ms=2_000))
    rig.step_until(lambda: (0, 1) in rig.ends)
    ticket = rig.tickets[0, 1]
    rig.core.abort_session(0, rig.now)
    assert rig.core.ticket(ticket.transfer_id) == ticket and ticket.lease_ms == 2_000
    rig.now += 1.9
    rig.step()
    assert rig.core.ticket(ticket.transfer_id) is not None
    rig.now += 0.2
    assert is_clean(rig) and rig.core.stats.transfers == {"expired": 1}


def test_lease_starts_with_the_token_and_at_each_renewal() -> None:
    rig = a_rig(SchedulerConfig(transfer_lease_s=LEASE_S))
    rig.submit(1, a_sequence(14, 8), transfer=PREFILL)
    rig.core.next_grant(rig.now)
    rig.core.take_outputs()
    rig.now += 3 * LEASE_S
    rig.core.next_grant(rig.now)
    assert rig.core.load().open_transfers == 1, "whoever computes still is waited for"
    other = a_rig(SchedulerConfig(transfer_lease_s=LEASE_S))
    ticket = prefilled(other)
    for _ in range(3):
        other.now += 0.9 * LEASE_S
        other.core.renew([ticket.transfer_id, b"unknown"], other.now)
        other.step()
    assert other.core.ticket(ticket.transfer_id) is not None
    other.now += LEASE_S
    assert is_clean(other) and other.core.stats.transfers == {"expired": 1}


def test_pulled_transfer_frees_its_pages() -> None:
    rig = a_rig()
    ticket = prefilled(rig)
    del rig.worker.moves._exports[ticket.transfer_id, 0]
    rig.worker.moves._ended.append((exports(rig)[0].id, 0, ticket.pages))
    assert is_clean(rig) and rig.core.stats.transfers == {"pulled": 1} and not cancelled(rig)


def test_an_export_that_the_worker_refuses_fails_the_transfer_alone() -> None:
    rig = a_rig()
    ticket = prefilled(rig)
    rig.worker.moves.cancel([exports(rig)[0].id])
    rig.step_until(lambda: rig.core.ticket(ticket.transfer_id) is None)
    assert is_clean(rig) and rig.core.stats.transfers == {"failed": 1} and not cancelled(rig)


@pytest.mark.parametrize("how", ["abort", "deadline", "session", "lost"])
def test_request_that_ends_before_its_token_ends_its_transfer(how: str) -> None:
    rig = a_rig(SchedulerConfig(max_num_batched_tokens=4))
    rig.submit(1, a_sequence(30, 8), transfer=PREFILL, deadline_s=rig.now + 0.02)
    rig.step_until(lambda: bool(exports(rig)))
    if how == "abort":
        rig.core.abort(0, 1, rig.now)
    elif how == "deadline":
        rig.now += 1
    elif how == "session":
        rig.core.abort_session(0, rig.now)
    else:
        rig.core.worker_lost(InvalidArgument("LOST", "", ""), rig.now)
        rig.core.check_integrity()
        assert rig.core.load().open_transfers == 0
        return
    assert is_clean(rig) and rig.core.stats.transfers == {"failed": 1} and len(cancelled(rig)) == 1


def test_ended_session_releases_its_transfers() -> None:
    rig = a_rig()
    prefilled(rig)
    rig.core.abort_session(0, rig.now)
    assert is_clean(rig) and rig.core.stats.transfers == {"released": 1}


def test_a_worker_without_an_address_exports_nothing() -> None:
    rig = Rig(page_size=4)
    rig.submit(1, a_sequence(14, 8), transfer=PREFILL)
    rig.run()
    assert rig.prefilled == [(0, 1)] and not rig.tickets and not exports(rig)


def test_request_with_both_roles_is_refused() -> None:
    rig = a_rig()
    with pytest.raises(InvalidArgument, match="BAD_TRANSFER"):
        rig.submit(1, a_sequence(4), transfer=KvTransfer(prefill_only=True, await_handover=True))


def test_restarted_request_is_exported_again_under_its_ticket() -> None:
    """The start of a second one is refused, and with it, maybe, that of the first: both are tried again."""
    rig = a_rig(SchedulerConfig(max_num_batched_tokens=4))
    rig.submit(1, a_sequence(30, 8), transfer=PREFILL)
    rig.step_until(lambda: bool(exports(rig)))
    request = rig.core._replica.requests[0, 1]
    rig.core._lifecycle.preempt(request, rig.now)
    rig.core.check_integrity()
    rig.step_until(lambda: (0, 1) in rig.prefilled)
    first, second = exports(rig)
    assert cancelled(rig) == [first.id] and first.hashes == second.hashes and first.lease == second.lease
    assert rig.core.ticket(rig.tickets[0, 1].transfer_id) is not None
    rig.core.release([second.lease])
    assert is_clean(rig) and rig.tokens[0, 1] == undisturbed(a_sequence(30, 8))[0][:1]


def test_late_first_token_ends_the_request_without_a_transfer() -> None:
    rig = Rig(worker=FakeWorker(with_address(make_hello(page_size=4), b"prefill"), depth=3), report_delay=lambda: 3)
    rig.submit(1, a_sequence(6, 8), transfer=PREFILL)
    rig.step_until(lambda: rig.worker.steps_launched > 0)
    rig.core._lifecycle.preempt(rig.core._replica.requests[0, 1], rig.now)
    rig.run()
    assert rig.prefilled == [(0, 1)] and rig.tokens[0, 1] == undisturbed(a_sequence(6, 8))[0][:1]
    assert rig.core.stats.transfers == {"failed": 1} and rig.core.stats.late_tokens == 1


def test_shared_prefix_is_exported_by_each_request() -> None:
    rig = a_rig()
    prompt = np.arange(13) + 2
    for handle in range(3):
        rig.submit(handle, a_sequence(np.append(prompt, 40 + handle), 8), transfer=PREFILL)
    rig.step_until(lambda: len(rig.prefilled) == 3)
    assert len({ticket.transfer_id for ticket in rig.tickets.values()}) == 3
    pages = [move.device_page.tolist() for move in exports(rig)]
    assert pages[0][:3] == pages[1][:3] == pages[2][:3] and len({p[3] for p in pages}) == 3
    for ticket in rig.tickets.values():
        rig.core.release([ticket.transfer_id])
        rig.step()
        rig.core.check_integrity()
    assert is_clean(rig)
