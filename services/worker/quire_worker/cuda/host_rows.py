"""HostRows: rows whose logits Python changes, between the model and the draw of a step on a GPU.

Only steps with such rows pay for it: they are launched kernel by kernel, and the model thread waits until the step's
logits are there. All that such a request asks of its logits is applied on the host, by the reference's own code.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from quire_common.telemetry.logs import get_logger
from quire_worker.engine.step_runner import as_slot_error
from quire_worker.sampling.logits_state import LogitsState

if TYPE_CHECKING:
    from torch import Tensor

    from quire_worker.arrays import Float32, Int32
    from quire_worker.sampling.logits_processor import LogitsProcessors
    from quire_worker.step import StepBatch

log = get_logger(__name__)


class HostRows:
    """Belongs to the model thread."""

    def __init__(self, processors: LogitsProcessors) -> None:
        self._processors = processors
        # By slot, the batch's controls and our own of the same sequence: the batch's are told of tokens by the thread
        # that takes results, a step later.
        self._held: dict[int, tuple[LogitsState, LogitsState]] = {}

    def clear(self) -> None:
        """Forget all states; all sequences are gone."""
        self._held.clear()

    def edit(self, batch: StepBatch, places: Int32, logits: Tensor, last_token: Tensor, changed: Changed) -> Changed:
        """Apply on the host what the rows that run Python ask of their `logits` [N, V]; returns `changed` with these
        rows added, which are drawn from instead. `places`: row by sequence; last_token [slots]: what was drawn before
        this step. Waits for the current stream. A row that fails has nothing left to draw, and its controls say why."""
        asked = [sequence for sequence, controls in batch.controls.items() if controls.runs_python]
        rows = torch.from_numpy(places[asked].astype(np.int64)).to(logits.device)
        values = logits.index_select(0, rows).float().cpu()
        sampled = last_token.cpu().numpy()
        for row, sequence in zip(values.numpy(), asked, strict=True):
            self._apply(batch, sequence, row, sampled)
        if changed is None:
            nobody = torch.zeros(logits.shape[0], dtype=torch.int64, device=logits.device)
            changed = nobody, torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
        address, target = changed
        target.index_copy_(0, rows, values.to(logits.device))
        # The states' addresses have been used; for the draw, anything but 0 says that the row was changed.
        return address.index_fill(0, rows, 1), target

    def _apply(self, batch: StepBatch, sequence: int, row: Float32, sampled: Int32) -> None:
        """Change one sequence's `row` of logits in place, by the host's own state of it, which is told the last token
        first. A failure is noted in the batch's controls, and nothing is raised."""
        slot, told = int(batch.slot[sequence]), batch.controls[sequence]
        try:
            own = self._own(slot, told)
            if batch.fed[sequence]:
                own.fed(int(sampled[slot]))
            own.apply(row, batch.blocked.get(sequence))
            if own.failure is not None:
                told.fail(own.failure)
        except Exception as error:
            log.exception("a row's logits could not be changed", slot=slot)
            told.fail(as_slot_error(error))
            row.fill(-np.inf)

    def _own(self, slot: int, told: LogitsState) -> LogitsState:
        """The host's own logits processor state of a slot, made anew when another sequence holds the slot."""
        held = self._held.get(slot)
        if held is None or held[0] is not told:
            held = self._held[slot] = told, LogitsState(told.sequence, self._processors)
        return held[1]


Changed = tuple["Tensor", "Tensor"] | None
"""int64 [N], not 0 where a row is drawn from the second, float32 [N, V], in place of its logits."""
