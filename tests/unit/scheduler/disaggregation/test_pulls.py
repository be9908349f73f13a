"""The decode side: who waits for a handover, what is pulled, and what becomes of it on every way out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from quire_common.credit import PageGeometry, ShardRange
from quire_common.errors import Unavailable
from quire_common.finish import FinishReason
from quire_common.pages import chain_hashes
from quire_common.ticket import KvTransfer, Ticket
from quire_scheduler.config import SchedulerConfig
from quire_scheduler.core.request import State
from tests.fakes.scheduler.scheduler_rig import Rig, a_sequence
from tests.fakes.scheduler.split_rig import (
    DECODE,
    PREFILL,
    Split,
    other_ids,
    prefilled,
    pulls,
    split_sides,
    starts,
    state_of,
)
from tests.fakes.worker.fake_worker import undisturbed


def in_halves(geometry: PageGeometry) -> PageGeometry:
    """The same pages, each shared by two ranks."""
    (group,) = geometry.groups
    half = group.page_bytes // 2
    return replace(geometry, groups=(replace(group, shards=(ShardRange(0, 0, half), ShardRange(1, half, half))),))


def over(prefill: Rig) -> int:
    """Transfers that ended well: the router may be as quick as the worker to tell of it."""
    ends = prefill.core.stats.transfers
    assert ends.keys() <= {"pulled", "released"}
    return sum(ends.values())


@pytest.mark.parametrize("tokens", [1, 3, 4, 5, 14, 16, 17])
def test_complete_handover_computes_nothing_again(tokens: int) -> None:
    split = Split(*split_sides())
    split.ask(1, a_sequence(tokens, 8))
    split.run()
    assert split.tokens(1) == undisturbed(a_sequence(tokens, 8))[0]
    assert len(split.prefill.tokens[0, 1]) == 1 and split.ends == {(0, 1): FinishReason.LENGTH}
    (start,) = starts(split.decode)
    assert (start.cached_len, start.sequence.known_len) == (tokens, tokens + 1)
    assert split.decode.core.stats.prefill_tokens == 1, "the new token alone"
    note = split.decode.pulled[0, 1]
    assert (note.pages, note.wanted, note.error) == (-(-tokens // 4), -(-tokens // 4), None)
    assert over(split.prefill) == 1
    stats = split.decode.core.stats
    assert (stats.prompt_transferred, stats.prompt_computed) == (tokens, 0)
    assert stats.pulled_bytes == 64 * note.pages and split.decode.core.load().pull_bytes_per_s > 0


@pytest.mark.parametrize(("hosts", "near"), [((b"a", b"a"), True), ((b"a", b"b"), False), ((b"", b""), False)])
def test_pulls_within_a_host_are_measured_apart(hosts: tuple[bytes, bytes], near: bool) -> None:
    split = Split(*split_sides(hosts=hosts))
    split.ask(1, a_sequence(14, 8))
    split.run()
    load = split.decode.core.load()
    assert split.decode.pulled[0, 1].near is near and load.host == hosts[1]
    assert (load.near_pull_bytes_per_s > 0, load.pull_bytes_per_s > 0) == (near, not near)


def test_pages_of_several_groups_come_together() -> None:
    split = Split(*split_sides(groups=2))
    split.ask(1, a_sequence(14, 8))
    split.run()
    assert [move.group for move in pulls(split.decode)] == [0, 1]
    assert split.tokens(1) == undisturbed(a_sequence(14, 8))[0]


def test_pulled_pages_are_cached_and_announced() -> None:
    split = Split(*split_sides())
    split.ask(1, a_sequence(14, 8))
    split.decode.step_until(lambda: True)
    while (0, 1) not in split.decode.pulled:
        split.step()
    named = split.decode.core.names.pages(0)
    hashes = chain_hashes(a_sequence(14, 8).prompt_ids, 4)
    assert list(named) == hashes, "whole pages, as soon as they are there, and never the partial one"
    split.decode.submit(2, a_sequence(14, 8))
    split.run()
    split.decode.run()
    assert split.decode.notes[0, 2].cached_tokens == 12


def test_cached_pages_are_not_pulled() -> None:
    split = Split(*split_sides())
    split.decode.submit(9, a_sequence(9, 1))
    split.decode.run()
    split.ask(1, a_sequence(14, 8))
    split.run()
    (move,) = pulls(split.decode)
    assert (move.first_index, len(move.device_page)) == (2, 2) and split.decode.pulled[0, 1].wanted == 2
    stats = split.decode.core.stats
    assert split.decode.notes[0, 1].cached_tokens == 14 and stats.prompt_transferred == 6
    assert over(split.prefill) == 1


def test_fully_cached_handover_releases_its_transfer() -> None:
    prefill, decode = split_sides()
    decode.submit(9, a_sequence(13, 1))
    decode.run()
    ticket, token = prefilled(prefill, 12)
    decode.submit(1, a_sequence(12, 8), transfer=DECODE)
    decode.hand_over(1, token, ticket=ticket)
    decode.run()
    assert not pulls(decode) and decode.pulled[0, 1][1:3] == (0, 0)
    assert decode.tokens[0, 1] == undisturbed(a_sequence(12, 8))[0][1:]


@pytest.mark.parametrize("order", ["ticket, token", "token, ticket", "both"])
def test_handovers_come_in_any_order(order: str) -> None:
    prefill, decode = split_sides()
    ticket, token = prefilled(prefill)
    decode.submit(1, a_sequence(14, 8), transfer=DECODE)
    for _ in range(5):
        decode.step()
    assert state_of(decode) is State.ASIDE and decode.core.load().waiting == 1 and not starts(decode)
    if order == "both":
        decode.hand_over(1, token, ticket=ticket)
    elif order == "ticket, token":
        decode.hand_over(1, ticket=ticket)
        for _ in range(10):
            decode.step()
            prefill.step()
        assert state_of(decode) is State.PULLING and (0, 1) in decode.pulled and not starts(decode)
        decode.core.check_integrity()
        decode.hand_over(1, token)
    else:
        decode.hand_over(1, token)
        for _ in range(5):
            decode.step()
        assert state_of(decode) is State.ASIDE
        decode.hand_over(1, ticket=ticket)
    decode.run()
    prefill.run()
    assert decode.tokens[0, 1] == undisturbed(a_sequence(14, 8))[0][1:]
    assert starts(decode)[0].cached_len == 14


def test_submission_with_a_ticket_pulls_at_once() -> None:
    """The first decode side has died: what the other side drew is known at once."""
    prefill, decode = split_sides()
    ticket, token = prefilled(prefill)
    emitted = undisturbed(a_sequence(14, 12))[0][:3]
    assert emitted[0] == token
    sequence = a_sequence(14, 12, output_ids=np.array(emitted, np.int32))
    decode.submit(1, sequence, transfer=KvTransfer(ticket=ticket))
    decode.run()
    prefill.run()
    assert starts(decode)[0].cached_len == 14 and decode.core.stats.prefill_tokens == 3
    assert decode.tokens[0, 1] == undisturbed(a_sequence(14, 12))[0][3:]


def test_requests_awaiting_handovers_do_not_block_the_queue() -> None:
    _, decode = split_sides(max_num_seqs=1)
    for handle in range(5):
        decode.submit(handle, a_sequence(9, 4), transfer=DECODE)
    decode.submit(9, a_sequence(9, 4))
    decode.step_until(lambda: (0, 9) in decode.ends)
    assert decode.core.load().waiting == 5 and decode.core.load().waiting_prefill_tokens == 0
    decode.core.abort_session(0, decode.now)
    decode.run()


def test_requests_awaiting_handovers_count_against_the_queue_bound() -> None:
    _, decode = split_sides(SchedulerConfig(max_waiting=3))
    for handle in range(3):
        decode.submit(handle, a_sequence(9, 4), transfer=DECODE)
    with pytest.raises(Exception, match="QUEUE_FULL"):
        decode.submit(3, a_sequence(9, 4), transfer=DECODE)
    decode.now += 1
    decode.core.abort_session(0, decode.now)
    decode.run()


def test_give_up_before_the_ticket_starts_an_ordinary_request() -> None:
    _, decode = split_sides()
    decode.submit(1, a_sequence(14, 8), transfer=DECODE)
    decode.hand_over(1, give_up=True)
    decode.run()
    assert decode.tokens[0, 1] == undisturbed(a_sequence(14, 8))[0] and not decode.pulled


def test_give_up_with_the_token_computes_all_pages() -> None:
    prefill, decode = split_sides()
    _, token = prefilled(prefill)
    decode.submit(1, a_sequence(14, 8), transfer=DECODE)
    decode.hand_over(1, token, give_up=True)
    decode.run()
    assert decode.tokens[0, 1] == undisturbed(a_sequence(14, 8))[0][1:] and starts(decode)[0].cached_len == 0


@pytest.mark.parametrize("tokens", [14, 16, 17])
def test_give_up_without_a_token_uses_pulled_pages(tokens: int) -> None:
    prefill, decode = split_sides()
    ticket, _ = prefilled(prefill, tokens)
    decode.submit(1, a_sequence(tokens, 8), transfer=DECODE)
    decode.hand_over(1, ticket=ticket)
    decode.step_until(lambda: (0, 1) in decode.pulled)
    decode.hand_over(1, give_up=True)
    decode.submit(2, a_sequence(tokens + 4, 2))
    decode.run()
    assert starts(decode)[0].cached_len == tokens - 1, "the last known token is computed, to draw the next"
    assert decode.tokens[0, 1] == undisturbed(a_sequence(tokens, 8))[0]
    assert decode.tokens[0, 2] == undisturbed(a_sequence(tokens + 4, 2))[0]


def test_give_up_during_a_pull_starts_with_arrived_pages() -> None:
    prefill, decode = split_sides(SchedulerConfig(max_num_batched_tokens=4))
    prefill.submit(1, a_sequence(30, 8), transfer=PREFILL)
    prefill.step_until(lambda: (0, 1) in prefill.tickets)
    decode.submit(1, a_sequence(30, 8), transfer=DECODE)
    decode.hand_over(1, ticket=prefill.tickets[0, 1])
    for _ in range(5):
        prefill.step()
        decode.step()
    assert state_of(decode) is State.PULLING
    decode.hand_over(1, give_up=True)
    decode.run()
    note = decode.pulled[0, 1]
    assert 0 < note.pages < note.wanted == 8 and note.error is not None and note.error.code == "PULL_INCOMPLETE"
    assert starts(decode)[0].cached_len == 4 * note.pages
    assert decode.tokens[0, 1] == undisturbed(a_sequence(30, 8))[0]


def test_missing_pages_of_a_pull_are_computed() -> None:
    prefill, decode = split_sides()
    decode.worker.fail_moves = 1.0
    for handle in range(1, 5):
        ticket, token = prefilled(prefill, 30, handle)
        decode.submit(handle, a_sequence(30, 8, cache_salt=""), transfer=DECODE)
        decode.hand_over(handle, token, ticket=ticket)
        decode.run()
        assert decode.tokens[0, handle] == undisturbed(a_sequence(30, 8))[0][1:]
    assert decode.pulled[0, 1].error is not None
    assert starts(decode)[0].cached_len == 4 * decode.pulled[0, 1].pages


def test_missing_pages_of_a_pull_are_looked_up() -> None:
    prefill, decode = split_sides(store={})
    ticket, token = prefilled(prefill, 30)
    prefill.core.release([ticket.transfer_id])
    prefill.run()
    decode.submit(1, a_sequence(30, 8), transfer=DECODE)
    decode.hand_over(1, token, ticket=ticket)
    decode.run()
    assert decode.pulled[0, 1].pages == 0 and starts(decode)[0].cached_len == 28, "whole pages are stored"
    assert decode.tokens[0, 1] == undisturbed(a_sequence(30, 8))[0][1:]
    assert (decode.core.stats.prompt_kvstore, decode.core.stats.prompt_transferred) == (28, 0)


def test_pull_of_an_ended_transfer_computes_the_prompt() -> None:
    prefill, decode = split_sides()
    ticket, token = prefilled(prefill)
    prefill.core.release([ticket.transfer_id])
    prefill.run()
    decode.submit(1, a_sequence(14, 8), transfer=DECODE)
    decode.hand_over(1, token, ticket=ticket)
    decode.run()
    assert decode.pulled[0, 1].pages == 0 and decode.tokens[0, 1] == undisturbed(a_sequence(14, 8))[0][1:]


@pytest.mark.parametrize(
    ("spoil", "code"),
    [
        (lambda t: replace(t, geometry=replace(t.geometry, page_size=8)), "INCOMPATIBLE_PAGES"),
        (lambda t: replace(t, geometry=replace(t.geometry, namespace=b"else")), "INCOMPATIBLE_PAGES"),
        (lambda t: replace(t, geometry=in_halves(t.geometry)), "INCOMPATIBLE_PAGES"),
        (lambda t: replace(t, page_hashes=t.page_hashes[::-1]), "TICKET_OF_OTHERS"),
        (lambda t: replace(t, tail_handle=bytes(32)), "TICKET_OF_OTHERS"),
        (lambda t: replace(t, page_hashes=(*t.page_hashes, bytes(32))), "TICKET_OF_OTHERS"),
        (lambda t: replace(t, sources=()), "NO_SOURCE"),
    ],
    ids=["page size", "model", "ranks", "tokens", "tail", "longer", "no source"],
)
def test_useless_ticket_is_reported_and_the_request_runs(spoil: Callable[[Ticket], Ticket], code: str) -> None:
    prefill, decode = split_sides()
    ticket, token = prefilled(prefill)
    decode.submit(1, a_sequence(14, 8), transfer=DECODE)
    decode.hand_over(1, ticket=spoil(ticket))
    decode.step()
    error = decode.pulled[0, 1].error
    assert error is not None and error.code == code and not starts(decode), "it does not run before its token"
    decode.hand_over(1, token)
    decode.run()
    assert not pulls(decode) and decode.tokens[0, 1] == undisturbed(a_sequence(14, 8))[0][1:]


def test_impossible_handover_tokens_fail_the_request() -> None:
    _, decode = split_sides()
    decode.submit(1, a_sequence(14, 8), transfer=DECODE)
    decode.submit(2, a_sequence(14, 1), transfer=DECODE)
    decode.hand_over(1, 5_000)
    decode.hand_over(2, 5)
    decode.run()
    assert {key[1]: error.code for key, error in decode.errors.items()} == {
        1: "BAD_TOKEN_ID",
        2: "NOTHING_TO_GENERATE",
    }


@pytest.mark.parametrize("at", [State.ASIDE, State.PULLING, State.PULLED])
@pytest.mark.parametrize("how", ["abort", "deadline", "lost"])
def test_leaving_in_any_state_releases_pull_and_pages(at: State, how: str) -> None:
    prefill, decode = split_sides(max_num_seqs=1, num_slots=1)
    decode.submit(9, a_sequence(5, 100))
    decode.step()
    ticket, token = prefilled(prefill)
    decode.worker.move_turns = (0, 1) if at is State.PULLED else (20, 30)
    decode.submit(1, a_sequence(14, 8), transfer=DECODE, deadline_s=decode.now + 0.5)
    if at is not State.ASIDE:
        decode.hand_over(1, token, ticket=ticket)
    decode.step_until(lambda: state_of(decode) is at)
    decode.core.check_integrity()
    if how == "abort":
        assert decode.core.abort(0, 1, decode.now)
    elif how == "deadline":
        decode.now += 1
    else:
        decode.core.worker_lost(Unavailable("WORKER_LOST", "", ""), decode.now)
        decode.core.check_integrity()
        assert decode.core.load().referenced_pages == 0
        return
    decode.step()
    decode.core.check_integrity()
    decode.core.abort(0, 9, decode.now)
    decode.run()
    assert (0, 1) in (decode.errors if how == "deadline" else decode.ends)


def test_a_started_request_needs_no_handover() -> None:
    _, decode = split_sides()
    decode.submit(1, a_sequence(14, 8), transfer=DECODE)
    decode.submit(2, a_sequence(9, 8))
    decode.hand_over(1, give_up=True)
    decode.step_until(lambda: len(decode.tokens[0, 1]) > 2)
    for handle in (1, 2, 99):
        decode.hand_over(handle, 5)
        decode.hand_over(handle, give_up=True)
    decode.run()
    assert decode.tokens[0, 1] == undisturbed(a_sequence(14, 8))[0]
    assert decode.tokens[0, 2] == undisturbed(a_sequence(9, 8))[0]


def test_handover_tokens_after_a_give_up_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    _, decode = split_sides()
    decode.submit(1, a_sequence(14, 8), transfer=DECODE)
    decode.hand_over(1, give_up=True)
    decode.step_until(lambda: len(decode.tokens[0, 1]) > 2)
    decode.core._lifecycle.preempt(decode.core._replica.requests[0, 1], decode.now)
    with monkeypatch.context() as patch:
        patch.setattr(decode.core._policy, "most_started", lambda ending: 0)
        decode.step_until(lambda: state_of(decode) is State.READY)
        decode.hand_over(1, 5)
    decode.run()
    assert decode.tokens[0, 1] == undisturbed(a_sequence(14, 8))[0]


def test_preempted_request_that_pulled_restarts_normally() -> None:
    split = Split(*split_sides(num_pages=20, max_num_seqs=3))
    for handle in range(3):
        split.ask(handle, a_sequence(other_ids(13, handle), 40))
    split.run()
    assert split.decode.core.stats.preemptions > 0
    for handle in range(3):
        expected = undisturbed(a_sequence(other_ids(13, handle), 40), max_len=split.decode.core.max_len)[0]
        assert split.tokens(handle) == expected
