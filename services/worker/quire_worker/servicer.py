"""The Worker contract: one short method per RPC, protobuf to domain and back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.v1 import common_pb2, worker_pb2, worker_pb2_grpc
from quire_common.credit.hello import epoch_to_pb, model_to_pb
from quire_common.errors import NotFound, Unavailable, to_message
from quire_worker.run_stream import RunStream

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import grpc

    from quire_common.errors import QuireError
    from quire_worker.load_watch import LoadState, LoadWatch
    from quire_worker.replica import Replica


class WorkerServicer(worker_pb2_grpc.WorkerServicer):
    """`replica` gives None until the model is loaded; `names` are those that a LoadRequest may use."""

    def __init__(self, watch: LoadWatch, replica: Callable[[], Replica | None], names: tuple[str, ...]) -> None:
        self._watch = watch
        self._replica = replica
        self._names = names
        self._draining = False

    def drain(self) -> None:
        """Refuse every scheduler that attaches from now on."""
        self._draining = True

    def Load(self, request: worker_pb2.LoadRequest, context: grpc.ServicerContext) -> Iterator[worker_pb2.LoadProgress]:
        """Stream how far the load is, up to its end or the client's. A load that failed ends with its error in the last
        message. Raises NotFound for a model that this worker does not serve."""
        if request.model and request.model not in self._names:
            raise _other_model(request.model, self._names)
        for state in self._watch.states(context.is_active):
            yield _progress(state)

    def Run(
        self, request_iterator: Iterator[worker_pb2.Grant], context: grpc.ServicerContext
    ) -> Iterator[worker_pb2.Report]:
        """Serve one scheduler, which replaces an attached one: take its Grants, yield Reports (see RunStream). Raises
        the load's error, or Unavailable while the model loads and for calls that begin once the worker drains."""
        replica = self._replica()
        if replica is None:
            raise self._watch.state.error or _still_loading()
        if self._draining:
            raise Unavailable("DRAINING", "The worker is about to stop.", "Attach to another worker.")
        yield from RunStream(replica.loop, replica.expect_peers, request_iterator, context).reports()

    def GetStatus(
        self, request: worker_pb2.GetStatusRequest, context: grpc.ServicerContext
    ) -> worker_pb2.GetStatusResponse:
        """Answer with the load's phase and, once the model is loaded, the epoch, the number of started slots, the steps
        so far, and whether a scheduler is attached."""
        replica, phase = self._replica(), self._watch.state.phase
        if replica is None:
            return worker_pb2.GetStatusResponse(epoch=common_pb2.Epoch(), phase=phase)
        engine = replica.engine
        return worker_pb2.GetStatusResponse(
            epoch=epoch_to_pb(engine.epoch),
            phase=phase,
            running=engine.residents.table.started(),
            steps=engine.steps,
            attached=replica.loop.attached,
        )


def _progress(state: LoadState) -> worker_pb2.LoadProgress:
    """The load's state as protobuf."""
    return worker_pb2.LoadProgress(
        phase=state.phase,
        done_bytes=state.done_bytes,
        total_bytes=state.total_bytes,
        model=None if state.model is None else model_to_pb(state.model),
        error=None if state.error is None else to_message(state.error),
    )


def _still_loading() -> QuireError:
    """Return the error of calls that need the model before it is loaded, to be retried after 1 s."""
    return Unavailable(
        "MODEL_LOADING", "The worker is still loading its model.", "Follow Load, then attach.", retry_after_s=1.0
    )


def _other_model(model: str, names: tuple[str, ...]) -> QuireError:
    return NotFound("MODEL_NOT_SERVED", f"This worker does not serve {model!r}.", f"It serves {names[0]!r}.")
