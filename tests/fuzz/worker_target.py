"""Target: the RPCs of a worker, with a model that counts."""

from __future__ import annotations

import time

from google.protobuf.message import DecodeError

from quire.v1 import common_pb2, worker_pb2
from quire_common.columns import pack_i32
from quire_common.credit import Epoch, encode_grant
from quire_common.credit.grant import Grant
from quire_common.credit.hello import scheduler_hello
from tests.fakes.worker.engine_bench import ROOMY, a_start
from tests.fakes.worker.worker_server import WorkerServer
from tests.fuzz.rpc_target import Method, RpcTarget, unary


class WorkerTarget(RpcTarget):
    """Worker, with a model that counts. A Grant of no epoch gets the worker's own; another epoch is refused at once."""

    covers = (
        "worker/quire_worker/servicer.py",
        "worker/quire_worker/run_stream.py",
        "worker/quire_worker/engine",
        "common/quire_common/credit",
    )

    def serve(self) -> str:
        self._worker = self.closing.enter_context(WorkerServer())
        self.closing.callback(lambda: self._worker.service.drain(0))
        return self._worker.address

    def prepare(self, method: Method, message: bytes) -> bytes:
        if method.request is not worker_pb2.Grant:
            return message
        try:
            grant = worker_pb2.Grant.FromString(message)
        except DecodeError:
            return message
        if not grant.HasField("epoch") and not grant.HasField("hello"):
            epoch = self._worker.stub.GetStatus(worker_pb2.GetStatusRequest()).epoch
            # The run that this stream begins.
            grant.epoch.CopyFrom(common_pb2.Epoch(boot_id=epoch.boot_id, run=epoch.run))
        return grant.SerializeToString()

    def settle(self) -> None:
        if self._worker.failed:
            raise AssertionError(f"the worker gave up: {self._worker.failed}")
        deadline = time.monotonic() + 10
        while self._worker.stub.GetStatus(worker_pb2.GetStatusRequest()).attached:
            if time.monotonic() > deadline:
                raise AssertionError("the worker still has the scheduler of a stream that ended")
            time.sleep(0.001)

    def make_methods(self) -> tuple[Method, ...]:
        pb = worker_pb2
        start = Grant(Epoch(1, 1), 1, start=[a_start(0, [5, 6, 7], [1, 2, 3])], budget=ROOMY)
        grants = [_without_epoch(encode_grant(grant)) for grant in (start, Grant(Epoch(1, 1), 2, budget=ROOMY))]
        more = pb.Grant(
            seq=2,
            stop_slot=pack_i32([0]),
            stop_keep_pages=pack_i32([0]),
            limit_slot=pack_i32([0]),
            limit_position=pack_i32([9]),
            grow_slot=pack_i32([0]),
            grow_group=pack_i32([0]),
            grow_page=pack_i32([4]),
            order_slot=pack_i32([0]),
        )
        copy = pb.Grant(
            seq=2,
            move=[pb.PageMove(id=1, kind=pb.PageMove.KIND_COPY, device_page=pack_i32([5]), source_page=pack_i32([1]))],
        )
        runs = (
            (scheduler_hello(), *grants),
            (scheduler_hello(), grants[0], more),
            (scheduler_hello(), grants[0], copy),
        )
        return (
            Method("/quire.v1.Worker/Run", pb.Grant, pb.Report, runs, streams_in=True, streams_out=True),
            Method(
                "/quire.v1.Worker/Load",
                pb.LoadRequest,
                pb.LoadProgress,
                ((pb.LoadRequest(model="counting"),),),
                streams_out=True,
            ),
            unary("Worker", "GetStatus", pb.GetStatusRequest(), pb.GetStatusResponse),
        )


def _without_epoch(grant: worker_pb2.Grant) -> worker_pb2.Grant:
    grant.ClearField("epoch")
    return grant
