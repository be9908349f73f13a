"""DelayStack: one paced replica for `bench.scheduler.delay`: a scheduler and a worker process, with the delaying proxy
between them."""

from __future__ import annotations

import time
from types import TracebackType

import grpc

from bench.harness.processes import Service
from bench.scheduler.delay_proxy import ProxyProcess
from bench.scheduler.delay_workload import PAGE_SIZE
from quire.v1 import scheduler_pb2, scheduler_pb2_grpc, worker_pb2, worker_pb2_grpc

_MAX_MODEL_LEN = 1024
_IDLE_LIMIT_S = 30.0


class DelayStack:
    """A context manager, which is ready when entered. `num_slots` and `pages` 0: the worker's default."""

    def __init__(self, step_ms: float, rows: int, *, lockstep: bool, num_slots: int = 0, pages: int = 0) -> None:
        mode = ["--lockstep"] if lockstep else []
        self.worker = Service(
            "worker", f"--paced={step_ms}", f"--max-num-seqs={rows}", f"--num-slots={num_slots}",
            f"--paced-pages={pages}", f"--block-size={PAGE_SIZE}", f"--max-model-len={_MAX_MODEL_LEN}", *mode,
        )  # fmt: skip
        try:
            self._proxy = ProxyProcess(self.worker.ready())
            self.scheduler = Service(
                "scheduler", f"--worker={self._proxy.address}", "--max-waiting=8192", "--load-interval-ms=20",
                "--max-num-batched-tokens=2048", *mode,
            )  # fmt: skip
        except BaseException:
            self.worker.stop()
            raise
        self._channels: list[grpc.Channel] = []

    def __enter__(self) -> DelayStack:
        try:
            self._channels = [grpc.insecure_channel(s.ready()) for s in (self.scheduler, self.worker)]
        except BaseException:
            self.close()
            raise
        self.address = self.scheduler.address()
        self._scheduler = scheduler_pb2_grpc.SchedulerStub(self._channels[0])
        self._worker = worker_pb2_grpc.WorkerStub(self._channels[1])
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End everything."""
        for channel in self._channels:
            channel.close()
        self.scheduler.stop()
        self._proxy.close()
        self.worker.stop()

    def set_delay(self, milliseconds: float) -> None:
        """Set the delay in each direction, from now on."""
        self._proxy.set_delay(milliseconds)

    def steps(self) -> int:
        """Return the number of steps that the worker has run so far."""
        return int(self._worker.GetStatus(worker_pb2.GetStatusRequest()).steps)

    def cpu_s(self) -> dict[str, float]:
        """Return the processor time of each process so far, by the process's nanosecond clock."""
        return {s.name: time.clock_gettime((~s.pid << 3) | 2) for s in (self.scheduler, self.worker)}

    def until_idle(self) -> None:
        """Wait until no request runs, waits or holds a page. Raises RuntimeError at the time limit."""
        call = self._scheduler.WatchLoad(scheduler_pb2.WatchLoadRequest(interval_ms=20), timeout=_IDLE_LIMIT_S)
        try:
            for load in call:
                if not (load.running or load.waiting or load.referenced_pages):
                    return
        except grpc.RpcError as error:
            raise RuntimeError("the scheduler does not come to rest") from error
        finally:
            call.cancel()
