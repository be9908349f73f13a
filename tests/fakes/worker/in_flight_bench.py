"""An engine with two steps in flight, whose ends the test chooses."""

from __future__ import annotations

from quire_common.credit import Report
from tests.fakes.worker.engine_bench import EngineBench
from tests.fakes.worker.held_device import HeldDevice


class FlightBench(EngineBench):
    """Two steps in flight; `end` ends the oldest and takes its Report, launching nothing."""

    device: HeldDevice

    def __init__(self, **options: object) -> None:
        super().__init__(device=HeldDevice, depth=2, **options)  # type: ignore[arg-type]  # EngineBench's own

    def launch(self) -> int:
        launched = 0
        while self.engine.launch():
            launched += 1
        self.engine.check_integrity()
        return launched

    def end(self) -> Report:
        self.device.end()
        report = self.engine.collect()
        assert report is not None and report.steps == 1
        self.told.add(report)
        self.engine.check_integrity()
        return report

    def started(self) -> int:
        return self.engine.residents.table.started()

    def quiet(self) -> bool:
        return self.engine.collect() is None

    def run_out(self) -> None:
        """Run to the end, ending steps as late as possible."""
        while self.launch() or self.device.launched or self.step() is not None:
            if self.device.launched:
                self.end()
