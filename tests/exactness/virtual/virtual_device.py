"""A device in virtual time: steps end one after the other, each after its own time. When their work is really done is
up to `settle`, since a right engine must not be able to tell:

launch   at once, as if the device were fast and the host slow to look
end      at the last moment: what is overwritten in the meantime is read, and what was copied is overwritten
late     at once, and all writes happen once more at the end, as those of a step that still runs may
mixed    each step as chance has it, never out of order
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from quire_common.credit import Finish
from quire_worker.engine.device import InlineDevice
from quire_worker.matcher.step_masks import ForcedTokens
from tests.exactness.events import Events

if TYPE_CHECKING:
    from collections.abc import Callable

    from quire_worker.engine.ports import Runner, StepOutcome
    from quire_worker.paced.random_yields import RandomYields
    from quire_worker.step import StepBatch
    from tests.exactness.subject import Memory, Written
    from tests.exactness.virtual.virtual_time import VirtualTime


@dataclass(eq=False)
class _InFlightStep:
    batch: StepBatch
    outcome: StepOutcome | None = None
    written: Written | None = None


class VirtualDevice:
    def __init__(
        self,
        time: VirtualTime,
        rng: np.random.Generator,
        runner: Runner,
        memory: Memory,
        step_us: tuple[int, int],
        settle: str,
        yields: RandomYields | None = None,
    ) -> None:
        """`yields` holds rows and proposes drafts; forced tokens are the drafts of sequences with grammars."""
        self.wake: Callable[[], None] = lambda: None
        self.in_flight: list[StepBatch] = []
        self.events = Events()
        self._time = time
        self._rng = rng
        self._inner = InlineDevice(runner, ForcedTokens(yields), yields)
        self._memory = memory
        self._step_us = step_us
        self._settle = settle
        self._waiting: list[_InFlightStep] = []
        self._late: list[_InFlightStep] = []
        self._ended: list[StepOutcome] = []
        self._free_us = 0

    def launch(self, batch: StepBatch) -> None:
        in_flight = _InFlightStep(batch)
        self._waiting.append(in_flight)
        self.in_flight.append(batch)
        settle = self._settle
        if settle == "mixed":
            settle = str(self._rng.choice(["launch", "end", "late"]))
        if settle != "end":
            while self._waiting:
                self._run(self._waiting.pop(0))
        if settle == "late":
            in_flight.written = self._memory.written(batch)
            self._late.append(in_flight)
        least, most = self._step_us
        self._free_us = max(self._free_us, self._time.now_us) + int(self._rng.integers(least, most + 1))
        self._time.at(self._free_us, lambda: self._end(in_flight))

    def prepare(self) -> bool:
        """Does nothing: this device defers no work."""
        return self._inner.prepare()

    def take_outcomes(self) -> list[StepOutcome]:
        ended, self._ended = self._ended, []
        return ended

    def drain(self) -> None:
        while self._waiting:
            self._run(self._waiting.pop(0))
        self.in_flight.clear()
        self._late.clear()
        self._ended.clear()

    def close(self) -> None:
        self._inner.close()

    def _run(self, in_flight: _InFlightStep) -> None:
        self._inner.launch(in_flight.batch)
        (in_flight.outcome,) = self._inner.take_outcomes()
        for before in self._late:
            if before.written is not None:
                before.written = before.written.without_drafts_of(in_flight.batch)

    def _end(self, in_flight: _InFlightStep) -> None:
        if not any(batch is in_flight.batch for batch in self.in_flight):
            return  # forgotten by drain
        while in_flight.outcome is None:
            self._run(self._waiting.pop(0))
        if in_flight.written is not None:
            self._memory.write_again(in_flight.written)
            self._late.remove(in_flight)
        del self.in_flight[0]
        self._count(in_flight.batch, in_flight.outcome)
        self._ended.append(in_flight.outcome)
        self.wake()

    def _count(self, batch: StepBatch, outcome: StepOutcome) -> None:
        """Count what rows drew: nothing, as many tokens as they tried, or fewer."""
        drawn = np.count_nonzero(outcome.token >= 0, axis=1)
        held = batch.sample & (drawn == 0) & (outcome.finish == Finish.NONE)
        self.events["held rows"] += int(held.sum())
        self.events["held first rows"] += int((held & ~batch.fed).sum())
        self.events["rows of several tokens"] += int((drawn > 1).sum())
        self.events["ends inside a row"] += int(((outcome.finish > 0) & (drawn > 1)).sum())
        self.events["rows of forced tokens"] += int((drawn[list(batch.constraints)] > 1).sum())
        if len(batch.drafts):
            tried = 1 + batch.drafts
            self.events["rows with a wrong draft"] += int(((drawn > 0) & (drawn < tried)).sum())
            self.events["rows with fewer drafts"] += int((batch.fed & (tried < tried.max())).sum())
