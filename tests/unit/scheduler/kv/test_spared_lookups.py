"""Lookups that are not made, since the router knew that nobody has more of a prompt than the device."""

from __future__ import annotations

import numpy as np
import pytest

from quire_common.ticket import KvTransfer
from quire_scheduler.config import SchedulerConfig
from tests.fakes.scheduler.scheduler_rig import Rig, a_sequence, random_ids
from tests.fakes.scheduler.split_rig import DECODE, prefilled, split_sides
from tests.fakes.worker.fake_worker import FakeWorker, make_hello, undisturbed

Store = dict[bytes, list[int]]


def a_rig(store: Store | None = None, **more: int) -> Rig:
    """With pages of four tokens; a lookup that is made is told apart by what it costs."""
    rig = Rig(kvstore=True, worker=FakeWorker(make_hello(page_size=4, **more), store={} if store is None else store))
    rig.watched = True
    return rig


def stored(*prompts: np.ndarray) -> Store:
    """A kvstore that has these from another replica."""
    store: Store = {}
    first = a_rig(store)
    for handle, prompt in enumerate(prompts):
        first.submit(handle, a_sequence(prompt, 2))
    first.run()
    return store


def test_cold_prompt_starts_without_a_lookup() -> None:
    rig = a_rig()
    rig.lookup_turns = 20
    rig.submit(1, a_sequence(random_ids(30, 1), 4), held_tokens=0)
    rig.step()
    assert rig.worker.seen[0].start, "its first Grant starts it"
    rig.run()
    assert not rig.looked_up and rig.core.stats.lookups_spared == 1
    assert rig.core.stats.cache_queries == rig.core.stats.cache_hits == 0, "what was not asked is no miss"
    assert rig.tokens[0, 1] == undisturbed(a_sequence(random_ids(30, 1), 4))[0]


@pytest.mark.parametrize(("held", "asked"), ((None, 1), (4, 1), (28, 1), (0, 0)))
def test_lookup_is_made_unless_the_router_knows_of_no_holder(held: int | None, asked: int) -> None:
    rig = a_rig(stored(random_ids(30, 1)))
    rig.submit(1, a_sequence(random_ids(30, 1), 4), held_tokens=held)
    rig.run()
    assert len(rig.looked_up) == asked and rig.core.stats.lookups_spared == 1 - asked
    # A wrong belief costs the time of computing, and no token.
    assert rig.notes[0, 1].cached_tokens == 28 * asked
    assert rig.tokens[0, 1] == undisturbed(a_sequence(random_ids(30, 1), 4))[0]


def test_prompt_held_by_the_device_is_not_looked_up() -> None:
    rig = a_rig()
    rig.submit(1, a_sequence(random_ids(41, 1), 1), held_tokens=0)
    rig.run()
    follows = np.concatenate([random_ids(41, 1), random_ids(41, 2)])
    rig.submit(2, a_sequence(follows, 2), held_tokens=40)
    rig.run()
    assert not rig.looked_up and rig.notes[0, 2].cached_tokens == 40
    rig.submit(3, a_sequence(np.concatenate([follows, random_ids(9, 3)]), 2), held_tokens=84)
    rig.run()
    assert [len(lookup.hashes) for lookup in rig.looked_up] == [2], "somebody has more: what follows its own 80"


def test_page_stored_by_this_replica_is_looked_up() -> None:
    rig = Rig(
        SchedulerConfig(enable_prefix_caching=False), kvstore=True, worker=FakeWorker(make_hello(page_size=4), store={})
    )
    for handle in (1, 2):
        rig.submit(handle, a_sequence(random_ids(30, 1), 2), held_tokens=0)
        rig.run()
    assert len(rig.looked_up) == 1 and rig.notes[0, 2].cached_tokens == 28


def test_request_that_waited_a_second_is_looked_up() -> None:
    rig = a_rig(stored(random_ids(30, 2)), max_num_seqs=1)
    rig.worker.step_us = 1
    rig.submit(1, a_sequence(3, 60))
    for handle in range(10, 19):
        rig.submit(handle, a_sequence(3, 2))
    rig.submit(2, a_sequence(random_ids(30, 2), 2), held_tokens=0)
    rig.step()
    rig.now += 1.5
    rig.run()
    assert len(rig.looked_up) == 1 and rig.notes[0, 2].cached_tokens == 28


def test_swapped_request_is_looked_up_again() -> None:
    rig = a_rig(num_pages=21, max_num_seqs=4)
    rig.worker.step_us = 500_000
    for handle in range(4):
        rig.submit(handle, a_sequence(random_ids(14, handle), 30), held_tokens=0)
    rig.run()
    stats = rig.core.stats
    assert stats.lookups_spared == 4 and len(rig.looked_up) == stats.swaps > 0
    assert all(rig.tokens[0, h] == undisturbed(a_sequence(random_ids(14, h), 30))[0] for h in range(4))


def test_decode_side_looks_up_after_a_handover() -> None:
    prefill, decode = split_sides(store={})
    ticket, _ = prefilled(prefill, tokens=30)
    prefill.core.release([ticket.transfer_id])
    prefill.run()
    decode.submit(1, a_sequence(30, 8), transfer=DECODE, held_tokens=0)
    decode.hand_over(1, give_up=True)
    decode.run()
    assert len(decode.looked_up) == 1 and decode.notes[0, 1].cached_tokens == 28


def test_prefill_side_starts_without_a_lookup() -> None:
    prefill, _ = split_sides(store={})
    prefill.submit(1, a_sequence(30, 8), transfer=KvTransfer(prefill_only=True), held_tokens=0)
    prefill.step_until(lambda: (0, 1) in prefill.prefilled)
    assert not prefill.looked_up and prefill.core.stats.lookups_spared == 1


def test_load_tells_the_kvstores_boot_id() -> None:
    rig = a_rig()
    assert rig.core.load().kvstore_boot_id == 0, "nobody has answered"
    rig.submit(1, a_sequence(random_ids(30, 1), 2), held_tokens=None)
    rig.run()
    assert rig.core.load().kvstore_boot_id == 1
    rig.boot_id = 2
    rig.submit(2, a_sequence(random_ids(30, 2), 2))
    rig.run()
    assert rig.core.load().kvstore_boot_id == 2
    rig.watched = False
    rig.submit(3, a_sequence(random_ids(30, 3), 2))
    rig.run()
    assert rig.core.load().kvstore_boot_id == 0, "it finds pages that it tells nobody of"
