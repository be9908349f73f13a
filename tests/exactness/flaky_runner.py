"""A runner that loses pages: now and then a row fails with PAGES_LOST, alone, and its sequence must start again."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from quire_common.errors import Unavailable

if TYPE_CHECKING:
    import numpy as np

    from quire_worker.engine.ports import Runner
    from quire_worker.step import StepBatch, StepOutput

# Of one life, so that no sequence loses its pages more often than a scheduler forgives.
_MOST = 3
# What is raised here is meant, and would fill the log.
logging.getLogger("quire_worker.engine.step_runner").setLevel(logging.CRITICAL + 1)


class FlakyRunner:
    """Passes steps on to the real runner; `lost` counts what it spoiled."""

    def __init__(self, runner: Runner, rng: np.random.Generator, share: float) -> None:
        self.lost = 0
        self._runner = runner
        self._rng = rng
        self._share = share
        self._seen_ns = 0
        self._victim = 0

    def run(self, batch: StepBatch) -> StepOutput:
        """A step is known by when it was formed and its victim by its first page, so that the row fails
        again when it is tried alone, and never later."""
        if batch.formed_ns != self._seen_ns:
            self._seen_ns, self._victim = batch.formed_ns, 0
            if self.lost < _MOST and self._rng.random() < self._share:
                self._victim = int(batch.page_table[int(self._rng.integers(len(batch.count))), 0])
                self.lost += 1
        if self._victim in batch.page_table[:, 0]:
            raise Unavailable("PAGES_LOST", "The pages are gone.", "Start again.")
        return self._runner.run(batch)
