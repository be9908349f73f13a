"""A worker with a scheduler's hand on it, for tests with several of them."""

from __future__ import annotations

from quire.v1 import worker_pb2_grpc
from tests.fakes.worker.engine_bench import Told
from tests.fakes.worker.worker_server import FakeScheduler


class Side:
    """A worker with a scheduler's hand on it."""

    def __init__(self, stub: worker_pb2_grpc.WorkerStub) -> None:
        self.scheduler, self.told = FakeScheduler(stub), Told()
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
