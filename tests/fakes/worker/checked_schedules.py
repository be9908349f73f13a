"""Compares each schedule that the engine's StepScheduler keeps with one that the batch rule makes anew."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire_worker.engine.step_schedule import StepScheduler, schedule_step, stalled_slots

if TYPE_CHECKING:
    from quire_common.credit import Budget
    from quire_worker.arrays import Int32
    from quire_worker.engine.engine import Engine
    from quire_worker.engine.step_schedule import StepSchedule


class CheckedScheduler(StepScheduler):
    """A StepScheduler that fails if a kept schedule is not the one that the batch rule would make now. `kept` counts
    the schedules that were used again."""

    kept = 0

    def schedule(self, budget: Budget, launched: int) -> StepSchedule:
        before = self._kept
        found = super().schedule(budget, launched)
        if before is None or before is not self._kept:
            return found
        self.kept += 1
        fresh = schedule_step(self._view(launched), budget, self._max_num_seqs)
        for mine, anew in ((found.slot, fresh.slot), (found.count, fresh.count)):
            assert mine.tolist() == anew.tolist(), "a kept schedule was used after a change"
        assert (found.decodes, found.num_decode_tokens) == (fresh.decodes, fresh.num_decode_tokens)
        return found

    def stalled_slots(self) -> Int32:
        found = super().stalled_slots()
        assert found.tolist() == stalled_slots(self._view(0), self._max_num_seqs).tolist()
        return found


def check_schedules(engine: Engine) -> CheckedScheduler:
    """Have an engine check its schedules."""
    engine._scheduler = CheckedScheduler(engine.residents.table, engine.spec.max_num_seqs)
    return engine._scheduler
