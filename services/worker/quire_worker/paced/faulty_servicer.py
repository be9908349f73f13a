"""FaultyServicer: a Worker servicer that sends wrong Reports from a step on. In all other respects it is the real
servicer."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire_common.columns import i64
from quire_worker.paced.faults import REPORT_FAULTS, SILENT, WRONG_EPOCH
from quire_worker.servicer import WorkerServicer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import grpc

    from quire.v1 import worker_pb2
    from quire_worker.load_watch import LoadWatch
    from quire_worker.paced.faults import Fault
    from quire_worker.replica import Replica


class FaultyServicer(WorkerServicer):
    """From that step on, heartbeats are wrong too."""

    def __init__(
        self, watch: LoadWatch, replica: Callable[[], Replica | None], names: tuple[str, ...], faults: Sequence[Fault]
    ) -> None:
        super().__init__(watch, replica, names)
        self._faults = [fault for fault in faults if fault.name in REPORT_FAULTS]
        self._step = 0

    def Run(
        self, request_iterator: Iterator[worker_pb2.Grant], context: grpc.ServicerContext
    ) -> Iterator[worker_pb2.Report]:
        """Run the real servicer's Run, and change or withhold its Reports as the faults say. The hello always
        passes."""
        for report in super().Run(request_iterator, context):
            if report.HasField("hello") or self._spoil(report):
                yield report

    def _spoil(self, report: worker_pb2.Report) -> bool:
        """Note the Report's last step, and apply the faults whose step has come. `wrong-epoch` gives the Report another
        boot id. Returns False if the Report must be withheld (`silent`)."""
        steps = len(i64(report.step_applied, "step_applied"))
        if steps:
            self._step = report.first_step + steps - 1
        due = {fault.name for fault in self._faults if fault.step <= self._step}
        if WRONG_EPOCH in due:
            report.epoch.boot_id ^= 1
        return SILENT not in due
