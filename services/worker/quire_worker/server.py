"""The worker's life: the port opens, the model loads while anyone may watch, the engine runs; SIGTERM drains it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from quire.v1 import worker_pb2, worker_pb2_grpc
from quire_common.errors import as_quire_error
from quire_common.telemetry.logs import get_logger
from quire_common.telemetry.metrics import registry
from quire_worker.load_watch import LoadWatch
from quire_worker.model_source import load_configured, with_model_path
from quire_worker.replica import Replica, ServedModel
from quire_worker.servicer import WorkerServicer

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import grpc

    from quire_common.serving.server import BoundServer
    from quire_worker.config import WorkerConfig

    Load = Callable[[WorkerConfig, Callable[[str, int, int], None]], ServedModel]

log = get_logger(__name__)
# Reader, model and writer threads hand over to one another within a step; Python's 5 ms would be several steps long.
SWITCH_INTERVAL_S = 0.0001
# A load may fail before anyone had the time to ask; then the process waits so long with its end.
LAST_WORD_S = 1.0


class WorkerService:
    """See quire_common.serving.server.SyncService. `load` makes the model; PacedService and tests pass another."""

    name = "worker"

    def __init__(self, config: WorkerConfig, bound: BoundServer, load: Load = load_configured) -> None:
        self._config = config
        self._bound = bound
        self._load = load
        self._watch = LoadWatch()
        self._replica: Replica | None = None
        self._servicer = WorkerServicer(self._watch, lambda: self._replica, (config.name, config.model))

    def register(self, server: grpc.Server) -> Sequence[str]:
        """Add the Worker servicer to the gRPC server; returns the full names of its services."""
        worker_pb2_grpc.add_WorkerServicer_to_server(self._servicer, server)
        return [worker_pb2.DESCRIPTOR.services_by_name["Worker"].full_name]

    def start(self) -> None:
        """Download the model if its name is one of the hub and files are missing, load it, and start the engine, with
        its metrics; watchers of Load see the progress. A later error of the model thread ends the process without a
        drain. Set Python's switch interval between threads to 0.1 ms. If any of this fails, wait up to a
        second for a watcher to receive the error, then raise it."""
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        try:
            config = with_model_path(self._config, self._watch.progress)
            loaded = self._load(config, self._watch.progress)
            self._replica = Replica(self._config, loaded, self._bound.fail)
            registry.name_model("quire_worker_", loaded.info.name)
            if loaded.device == "cuda":
                from quire_worker.nvml import show_gpu  # torch comes with it

                show_gpu()
        except Exception as error:
            self._watch.failed(as_quire_error(error))
            self._watch.wait_heard(LAST_WORD_S)
            raise
        spec = self._replica.engine.spec
        log.info(
            "model loaded",
            model=loaded.info.name,
            pages=spec.num_pages,
            slots=spec.num_slots,
            kv_tokens=spec.kv_tokens,
            max_model_len=spec.max_model_len,
            max_concurrency=round(spec.max_concurrency, 2),
            sampling_defaults=dict(loaded.info.sampling_defaults),
        )
        self._watch.succeeded(loaded.info)

    def drain(self, timeout_s: float) -> None:
        """Refuse new schedulers, tell the attached one that the worker will stop, and wait up to `timeout_s` until no
        sequence is left. While the model loads, only refuse."""
        self._servicer.drain()
        if self._replica is not None:
            self._replica.loop.drain()
            self._replica.loop.wait_vacant(timeout_s)

    def close(self) -> None:
        """End the engine, its threads and its KV transfer agents."""
        if self._replica is not None:
            self._replica.close()
