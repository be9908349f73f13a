"""PacedService: the worker's service over a made-up model."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire_worker.paced.faults import parse_faults
from quire_worker.paced.faulty_servicer import FaultyServicer
from quire_worker.paced.served import load_paced
from quire_worker.server import WorkerService

if TYPE_CHECKING:
    from quire_common.serving.server import BoundServer
    from quire_worker.config import WorkerConfig


class PacedService(WorkerService):
    """The real service, apart from its model and its faults."""

    def __init__(self, config: WorkerConfig, bound: BoundServer) -> None:
        super().__init__(config, bound, load_paced)
        self._servicer = FaultyServicer(
            self._watch, lambda: self._replica, (config.name, config.model), parse_faults(config.paced_fault)
        )
