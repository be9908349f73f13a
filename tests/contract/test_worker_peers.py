"""Pages from worker to worker: what one prefills, the other pulls meanwhile, and goes on with."""

from __future__ import annotations

import numpy as np

from quire_common.credit import Budget, MoveKind, PageMove, RankAddress
from quire_common.pages import chain_hashes
from quire_worker.config import WorkerConfig
from tests.fakes.counting_runner import CountingRunner, continuation
from tests.fakes.engine_bench import ROOMY, Told, a_start, ids
from tests.fakes.worker_server import VOCAB, FakeScheduler, WorkerServer, counting_model

PROMPT = list(range(20, 34))  # three full pages of 4, and two tokens
HANDLES = (*chain_hashes(PROMPT, 4), b"t" * 32)
TAIL = 2
LEASE_KEY = b"k" * 32
A_CHUNK = Budget(1000, 1000, chunk_cap=4, partial_prefills=9, step_limit=1)


class Side:
    """A worker with a scheduler's hand on it."""

    def __init__(self, worker: WorkerServer) -> None:
        self.scheduler, self.told = FakeScheduler(worker.stub), Told()
        self.hello = self.scheduler.attach()

    def moved(self, move_id: int) -> tuple[int, int]:
        while move_id not in self.told.moved:
            self.told.add(self.scheduler.next_report())
        return self.told.moved[move_id]

    def finished(self, slot: int) -> list[int]:
        while slot not in self.told.finish:
            self.told.add(self.scheduler.next_report())
        return self.told.tokens[slot]

    def prefilled(self, slot: int, position: int) -> None:
        while self.told.prefill.get(slot, 0) < position:
            self.told.add(self.scheduler.next_report())


def a_worker(runner: CountingRunner | None = None, **options: str) -> WorkerServer:
    config = WorkerConfig(model="counting", max_num_seqs=4, **options)  # type: ignore[arg-type]  # flags are strings here
    return WorkerServer(lambda config, progress: counting_model(runner), config)


def export(move_id: int, *pages: int) -> PageMove:
    return PageMove(move_id, MoveKind.EXPORT, 0, ids(*pages), HANDLES, b"id", tail_tokens=TAIL, lease_key=LEASE_KEY)


def pull(move_id: int, source: tuple[RankAddress, ...], *pages: int, first: int = 0) -> PageMove:
    return PageMove(
        move_id, MoveKind.PULL, 0, ids(*pages), HANDLES[first:], b"id",
        tail_tokens=TAIL, lease_key=LEASE_KEY, first_index=first, source=source,
    )  # fmt: skip


def test_what_one_prefills_another_pulls_meanwhile_and_goes_on_with() -> None:
    runner = CountingRunner(64, 4, VOCAB)
    with a_worker() as prefills, a_worker(runner) as decodes:
        here, there = Side(prefills), Side(decodes)
        here.scheduler.grant(
            start=[a_start(0, PROMPT, [1, 2, 3, 4], max_tokens=1)], move=[export(1, 1, 2, 3, 4)], budget=A_CHUNK
        )
        there.scheduler.grant(move=[pull(1, here.hello.data_address, 11, 12, 13, 14)], budget=ROOMY)
        for position in (4, 8, 12):
            here.prefilled(0, position)
            here.scheduler.grant()
        first = here.finished(0)
        assert there.moved(1) == (0, 4) and here.moved(1) == (0, 4)
        np.testing.assert_array_equal(runner.pages[[11, 12, 13]].ravel(), PROMPT[:12])
        start = a_start(0, PROMPT, [11, 12, 13, 14, 15, 16], output=tuple(first), cached=len(PROMPT))
        there.scheduler.grant(start=[start])
        assert first + there.finished(0) == continuation(PROMPT, 8, VOCAB)
        assert runner.batches[0].position.tolist() == [len(PROMPT)], "nothing is computed again"
        assert here.told.errors == there.told.errors == []
