"""Pages that are held without a slot: how many, for whom, and who gives them back when they lack."""

from __future__ import annotations

import pytest

from quire_common.ticket import KvTransfer
from quire_scheduler.config import SchedulerConfig
from quire_scheduler.core.request import State
from quire_scheduler.disaggregation.handover import NO_TRANSFER
from tests.fakes.scheduler.scheduler_rig import a_sequence
from tests.fakes.scheduler.split_rig import DECODE, PREFILL, other_ids, prefilled, pulls, split_sides, state_of
from tests.fakes.worker.fake_worker import undisturbed


def test_pulling_request_takes_pages_before_a_slot_is_free() -> None:
    prefill, decode = split_sides(max_num_seqs=1, num_slots=1)
    decode.submit(9, a_sequence(5, 60))
    decode.step()
    ticket, token = prefilled(prefill)
    decode.submit(1, a_sequence(14, 8), transfer=DECODE)
    decode.hand_over(1, token, ticket=ticket)
    decode.step_until(lambda: (0, 1) in decode.pulled)
    assert state_of(decode) is State.PULLED and (0, 9) not in decode.ends
    decode.run()
    assert decode.order.index((0, 1)) == 60, "it waits for the slot like anybody else"
    assert decode.tokens[0, 1] == undisturbed(a_sequence(14, 8))[0][1:]


def test_pages_held_without_a_slot_are_bounded_and_later_requests_pass() -> None:
    prefill, decode = split_sides(num_pages=61, max_num_seqs=4)
    ticketed = [prefilled(prefill, 25, handle) for handle in range(4)]
    for handle, (ticket, _) in enumerate(ticketed):
        decode.submit(handle, a_sequence(25, 8), transfer=DECODE)
        decode.hand_over(handle, ticket=ticket)
    decode.core._replica.cache.enabled = False
    decode.submit(9, a_sequence(other_ids(9, 1), 4))
    decode.step_until(lambda: (0, 9) in decode.ends)
    states = [state_of(decode, handle) for handle in range(4)]
    assert states == [State.PULLING, State.PULLING, State.ASIDE, State.ASIDE], "7 pages each, a quarter of 60 at most"
    for handle, (_, token) in enumerate(ticketed):
        decode.hand_over(handle, token)
    decode.run()
    for handle in range(4):
        assert decode.tokens[0, handle] == undisturbed(a_sequence(25, 8))[0][1:]


def test_running_requests_take_pages_from_the_newest_pulling_ones() -> None:
    prefill, decode = split_sides(num_pages=41, max_num_seqs=2, max_model_len=160)
    first, second = prefilled(prefill, 18, 1), prefilled(prefill, 17, 2)
    decode.core._replica.cache.enabled = False
    for handle, (ticket, _) in ((1, first), (2, second)):
        decode.submit(handle, a_sequence(18 if handle == 1 else 17, 8), transfer=DECODE)
        decode.hand_over(handle, ticket=ticket)
    decode.step_until(lambda: len(decode.pulled) == 2)
    decode.submit(9, a_sequence(5, 154))
    decode.step_until(lambda: state_of(decode, 2) is State.ASIDE)
    assert state_of(decode, 1) is State.PULLING and decode.core.stats.preemptions == 0
    decode.step_until(lambda: (0, 9) in decode.ends)
    assert decode.core.stats.preemptions == 0
    decode.hand_over(1, first[1])
    decode.hand_over(2, second[1])
    decode.run()
    assert decode.tokens[0, 1] == undisturbed(a_sequence(18, 8))[0][1:]
    assert decode.tokens[0, 2] == undisturbed(a_sequence(17, 8))[0][1:]
    prefill.run()


def test_pull_that_was_given_back_midway_is_pulled_again() -> None:
    prefill, decode = split_sides(SchedulerConfig(max_num_batched_tokens=4), num_pages=41)
    prefill.submit(1, a_sequence(30, 8), transfer=PREFILL)
    prefill.step_until(lambda: (0, 1) in prefill.tickets)
    decode.submit(1, a_sequence(30, 8), transfer=DECODE)
    decode.hand_over(1, ticket=prefill.tickets[0, 1])
    decode.step_until(lambda: state_of(decode) is State.PULLING)
    replica = decode.core._replica
    assert replica.holdings.reclaim_pages(1) == 8 and state_of(decode) is State.ASIDE
    assert replica.holdings.coming(late=False) == 40, "they come back as soon as the moves are reported"
    decode.core.check_integrity()
    prefill.step_until(lambda: (0, 1) in prefill.prefilled)
    decode.hand_over(1, *prefill.tokens[0, 1])
    decode.run()
    assert len(pulls(decode)) == 2 and decode.pulled[0, 1].pages == 8
    assert decode.tokens[0, 1] == undisturbed(a_sequence(30, 8))[0][1:]
    prefill.run()
    assert prefill.core.stats.transfers == {"pulled": 1}


@pytest.mark.parametrize(("transfer", "patience_s"), [(NO_TRANSFER, 1.0), (PREFILL, 10.0)], ids=["plain", "prefill"])
def test_head_of_queue_gets_held_pages_after_a_second(transfer: KvTransfer, patience_s: float) -> None:
    prefill, _ = split_sides(num_pages=13)
    for handle in range(3):
        prefilled(prefill, 14, handle)
    prefill.submit(9, a_sequence(other_ids(40, 1), 4), transfer=transfer)
    begun = prefill.now
    while prefill.now < begun + 0.9 * patience_s:
        prefill.now += 0.2
        prefill.core.renew([ticket.transfer_id for ticket in prefill.tickets.values()], prefill.now)
        prefill.step()
        assert prefill.core.load().open_transfers == 3 and not prefill.core.busy
    prefill.now += 0.2 * patience_s
    prefill.core.renew([ticket.transfer_id for ticket in prefill.tickets.values()], prefill.now)
    prefill.step_until(lambda: bool(prefill.tokens[0, 9]))
    assert prefill.core.stats.transfers.keys() == {"failed"}
    prefill.core.abort_session(0, prefill.now)
    prefill.run()


def test_cached_pages_of_the_head_are_not_free_for_the_rest_of_it() -> None:
    """They are free, but of no use for the rest of it."""
    prefill, _ = split_sides(num_pages=13)
    prefill.submit(8, a_sequence(other_ids(32, 1), 1))
    prefill.run()
    prefilled(prefill, 14)
    prefill.submit(9, a_sequence(other_ids(38, 1), 1))
    for _ in range(10):
        prefill.now += 0.2
        prefill.core.renew([prefill.tickets[0, 1].transfer_id], prefill.now)
        prefill.step()
    prefill.step_until(lambda: (0, 9) in prefill.ends)
    prefill.run()


def test_pages_that_another_request_fills_are_pulled_too() -> None:
    prefill, decode = split_sides(SchedulerConfig(max_num_batched_tokens=2), num_pages=8)
    ticket, token = prefilled(prefill)
    decode.submit(9, a_sequence(14, 2))
    decode.submit(1, a_sequence(14, 8), transfer=DECODE)
    decode.hand_over(1, token, ticket=ticket)
    decode.step_until(lambda: (0, 1) in decode.pulled)
    decode.run()
    assert decode.tokens[0, 1] == undisturbed(a_sequence(14, 8))[0][1:]
    assert decode.tokens[0, 9] == undisturbed(a_sequence(14, 2))[0]
