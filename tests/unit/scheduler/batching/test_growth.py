"""Growth where pages run out while stores have some of them: who waits for these, and who gives way."""

from __future__ import annotations

from quire_common.credit import MoveKind
from quire_common.sequence import RequestContext, Sequence
from quire_scheduler.config import SchedulerConfig
from quire_scheduler.kv.page_moves import Move
from tests.fakes.scheduler.scheduler_rig import Rig, a_sequence, random_ids
from tests.fakes.worker.fake_worker import FakeWorker, make_hello, undisturbed
from tests.unit.scheduler.kv.test_offload import moves

# Turns that a store takes, a millisecond each; and the time after which nobody waits for one.
STORE_TURNS = 2000
LATE_S = 0.3
OLDEST, SECOND, THIRD, LATEST = 1, 2, 3, 4


class Crowd:
    """Four sequences that grow at the same pace, and outgrow the pages together. `policy`: of stores that nobody asked
    for."""

    def __init__(self, policy: str = "off", latest_prompt: int = 3) -> None:
        worker = FakeWorker(make_hello(num_pages=27, page_size=4, max_num_seqs=4))
        worker.move_turns = (STORE_TURNS, STORE_TURNS + 1)
        self.rig = Rig(SchedulerConfig(kvstore_offload=policy), kvstore=True, worker=worker)
        self.replica = self.rig.core._replica
        self.sequences: dict[int, Sequence] = {}
        for handle in (OLDEST, SECOND, THIRD, LATEST):
            prompt = latest_prompt if handle == LATEST else 3
            self.sequences[handle] = a_sequence(random_ids(prompt, handle), 40)
            self.rig.submit(handle, self.sequences[handle])

    @property
    def running(self) -> list[int]:
        """Those that hold pages."""
        return [handle for (_, handle), request in self.replica.requests.items() if request.tables]

    @property
    def stored(self) -> int:
        """Stores that were begun."""
        return len(moves(self.rig, MoveKind.STORE))

    def written(self) -> int:
        return sum(map(len, self.rig.tokens.values()))

    def store(self, *handles: int) -> None:
        """A store of all pages that these have now."""
        for handle in handles:
            request = self.replica.requests[0, handle]
            hashes = tuple(bytes([handle, index]) for index in range(len(request.tables[0])))
            move = Move(MoveKind.STORE, 0, list(request.tables[0]), hashes, request)
            self.replica.moves.begin_move(move, RequestContext("store"), self.rig.now)

    def step(self, turns: int = 1) -> None:
        for _ in range(turns):
            self.rig.step()
            self.rig.core.check_integrity()

    def until_full(self) -> None:
        """Until there is not one more page for each."""
        while len(self.running) < 4 or self.replica.pools.free >= 4:
            self.step()

    def until_preempted(self) -> None:
        while not self.replica.stats.preemptions:
            self.step()

    def assert_answered(self) -> None:
        """Each as if it had been alone."""
        for handle, sequence in self.sequences.items():
            assert (0, handle) in self.rig.ends
            assert self.rig.tokens[0, handle] == undisturbed(sequence, max_len=self.rig.core.max_len)[0]


def test_pages_of_a_timely_store_count_as_coming() -> None:
    crowd = Crowd()
    crowd.until_full()
    crowd.store(LATEST)
    crowd.until_preempted()
    assert crowd.running == [OLDEST, SECOND, THIRD], "what the latest held is enough for all others"
    crowd.step(10)
    before = crowd.written()
    crowd.step(50)
    assert crowd.running == [OLDEST, SECOND, THIRD] and crowd.written() == before, "they wait"
    crowd.rig.now += LATE_S
    crowd.step(10)
    assert crowd.running == [OLDEST, SECOND] and crowd.written() > before, "but not for long"


def test_pages_of_a_late_store_do_not_count_as_coming() -> None:
    crowd = Crowd()
    crowd.until_full()
    crowd.store(LATEST)
    crowd.rig.now += LATE_S
    crowd.until_preempted()
    assert crowd.running == [OLDEST, SECOND], "the third gives the pages that the latest cannot give"
    crowd.step(STORE_TURNS // 2)
    assert crowd.replica.moves.stores == 1, "it is still under way"
    crowd.assert_answered()


def test_oldest_request_is_never_preempted_by_growth() -> None:
    crowd = Crowd()
    crowd.until_full()
    crowd.store(SECOND, THIRD, LATEST)
    crowd.rig.now += LATE_S
    crowd.until_preempted()
    crowd.step(100)
    assert crowd.running == [OLDEST]
    crowd.step(STORE_TURNS)
    crowd.rig.run()
    crowd.assert_answered()


def test_preempted_pages_are_stored_only_while_stores_are_timely() -> None:
    for late in (False, True):
        crowd = Crowd("write-through", latest_prompt=33)
        while not crowd.stored:
            crowd.step()
        crowd.rig.now += LATE_S * late
        crowd.until_preempted()
        stats, stored = crowd.replica.stats, crowd.stored
        assert LATEST not in crowd.running
        crowd.step()
        assert crowd.stored == stored + (not late)
        assert stats.offload_dropped == 3 * late, "pages that had filled since"
        if late:
            crowd.step(STORE_TURNS // 2)
            crowd.assert_answered()
