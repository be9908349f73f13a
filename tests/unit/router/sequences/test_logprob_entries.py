"""Logprobs that wait for a client are packed, so that the garbage collector does not visit them."""

from __future__ import annotations

import gc
from array import array

from quire_router.sequences.logprob_entries import LogprobEntries, PromptEntries, pack_entry, unpack_entry

TOPS = 20


def packed(token_id: int, count: int = TOPS) -> bytes:
    tops = range(token_id, token_id + count)
    return pack_entry(
        token_id, -0.5 * token_id, 3, array("i", tops).tobytes(), array("f", [-0.25 * t for t in tops]).tobytes()
    )


def test_logprob_entry_round_trips() -> None:
    for count in (0, 1, TOPS):
        entry = unpack_entry(packed(7, count))
        assert (entry.token_id, entry.logprob, entry.rank) == (7, -3.5, 3)
        assert list(entry.top_ids) == list(range(7, 7 + count))
        assert list(entry.top_logprobs) == [-0.25 * t for t in range(7, 7 + count)]


def test_slices_and_iteration_keep_the_order_of_entries() -> None:
    entries = LogprobEntries(packed(token_id) for token_id in range(3))
    entries.append(packed(3))
    assert [entry.token_id for entry in entries[1:3]] == [1, 2]
    assert [entry.token_id for entry in entries] == [0, 1, 2, 3]
    assert (len(entries), entries[-1].token_id) == (4, 3)


def test_prompt_positions_without_logprobs_are_none() -> None:
    entries = PromptEntries({1: packed(5), 2: packed(6)}, 4)
    assert [entry and entry.token_id for entry in entries] == [None, 5, 6, None]
    assert [entry and entry.token_id for entry in entries[1:]] == [5, 6, None]
    assert len(entries) == 4


def test_waiting_entries_are_not_tracked_by_the_garbage_collector() -> None:
    gc.collect()
    before = len(gc.get_objects())
    entries = LogprobEntries(packed(token_id) for token_id in range(10_000))
    assert len(gc.get_objects()) - before < 100
    assert len(entries) == 10_000
