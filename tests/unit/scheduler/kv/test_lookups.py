"""Lookups: who waits for them, and for how long; and what they find for requests that are not new."""

from __future__ import annotations

import numpy as np

from quire_common.credit import MoveKind
from quire_scheduler.config import SchedulerConfig
from tests.fakes.scheduler.scheduler_rig import Rig, a_sequence, random_ids
from tests.fakes.worker.fake_worker import FakeWorker, make_hello, undisturbed

Store = dict[bytes, list[int]]


def a_rig(store: Store | None = None, **more: int) -> Rig:
    return Rig(kvstore=True, worker=FakeWorker(make_hello(page_size=4, **more), store={} if store is None else store))


def loads(rig: Rig) -> list[int]:
    return [len(m.device_page) for grant in rig.worker.seen for m in grant.move if m.kind is MoveKind.LOAD]


def test_slow_lookup_delays_only_its_own_request() -> None:
    rig = a_rig(max_num_seqs=2, num_pages=200)
    rig.submit(0, a_sequence(3, 200))
    rig.step()
    rig.lookup_turns = 80
    for handle in range(1, 31):
        rig.submit(handle, a_sequence(random_ids(30, handle), 1))
    rig.submit(99, a_sequence(3, 2))
    begun = rig._turn
    while (0, 99) not in rig.ends:
        rig.step()
    assert rig._turn - begun < 40, "it had nothing to look up, and thirty before it wait for their answers"
    assert len(rig.ends) == 1
    rig.run()
    assert len(rig.ends) == 32


def test_a_lookup_that_fails_is_not_repeated_for_its_request() -> None:
    rig = a_rig(num_pages=21, max_num_seqs=4)
    rig.lookups_fail = True
    rig.worker.step_us = 500_000
    for handle in range(4):
        rig.submit(handle, a_sequence(random_ids(14, handle), 30))
    rig.run()
    assert rig.core.stats.preemptions > 0
    uids = [lookup.uid for lookup in rig.looked_up]
    assert uids and len(uids) == len(set(uids))
    assert rig.core.stats.lookups_failed == len(uids)


def test_lookups_pause_while_the_kvstore_does_not_answer() -> None:
    rig = a_rig(num_pages=200, max_num_seqs=1)
    rig.lookups_fail = True
    for handle in range(20):
        rig.submit(handle, a_sequence(random_ids(14, handle), 4))
    rig.run()
    # Those that were under way when it was found out.
    assert 3 <= len(rig.looked_up) <= 3 + 5
    rig.lookups_fail = False
    rig.now += 5.0
    before = len(rig.looked_up)
    for handle in range(20, 24):
        rig.submit(handle, a_sequence(random_ids(14, handle), 4))
    rig.run()
    assert len(rig.looked_up) == before + 1, "one tries it"
    for handle in range(24, 28):
        rig.submit(handle, a_sequence(random_ids(14, handle), 4))
    rig.run()
    assert len(rig.looked_up) == before + 1 + 4
    assert rig.core.stats.lookups_failed == before


def test_migrated_request_finds_pages_of_its_output() -> None:
    store: Store = {}
    first = a_rig(store, num_pages=100)
    whole = a_sequence(random_ids(10, 3), 40)
    first.submit(1, whole)
    first.run()
    emitted = np.array(undisturbed(whole)[0][:30], np.int32)
    rig = a_rig(store, num_pages=100)
    rig.submit(2, a_sequence(random_ids(10, 3), 40, output_ids=emitted))
    rig.run()
    assert loads(rig) == [9] and rig.core.stats.prefill_tokens == 40 - 36
    assert rig.tokens[0, 2] == undisturbed(whole)[0][30:]
    assert rig.notes[0, 2].cached_tokens == 10, "as usage has it: prompt tokens"


def test_siblings_share_one_load() -> None:
    store: Store = {}
    first = a_rig(store, num_pages=100)
    first.submit(1, a_sequence(random_ids(41, 1), 2))
    first.run()
    rig = a_rig(store, num_pages=200, max_num_seqs=8)
    rig.submit(1, a_sequence(5, 60))
    rig.step()
    rig.worker.move_turns = (20, 21)
    for sample in range(4):
        rig.submit(10 + sample, a_sequence(random_ids(41, 1), 4))
    while not loads(rig):
        rig.step()
    heard = len(rig.tokens[0, 1])
    for _ in range(15):
        rig.step()
    assert len(rig.tokens[0, 1]) >= heard + 14, "a slot that runs does not wait for the load"
    rig.run()
    assert loads(rig) == [10]
    assert [rig.notes[0, 10 + sample].cached_tokens for sample in range(4)] == [40] * 4


def test_one_lookup_names_no_more_pages_than_a_kvstore_takes() -> None:
    hello = make_hello(page_size=1, num_pages=9_000, max_model_len=9_000)
    rig = Rig(SchedulerConfig(max_num_batched_tokens=9_000), kvstore=True, worker=FakeWorker(hello))
    rig.submit(1, a_sequence(random_ids(8_500, 1), 1))
    rig.step()
    assert [len(lookup.hashes) for lookup in rig.looked_up] == [8_192]
