"""HostRows: rows of a step on a GPU whose logits are changed by Python code before the step samples.

Only steps with such rows pay for them: they are launched kernel by kernel, and the model thread waits until the step's
logits are computed. The host applies all logit controls of such a request, with the code of the reference.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from quire_common.telemetry.logs import get_logger
from quire_worker.engine.step_runner import as_slot_error
from quire_worker.ops.triton.kernels.mask import HAS_MASK
from quire_worker.sampling.logits_state import LogitsState
from quire_worker.sampling.token_mask import MaskKind, TokenMask

if TYPE_CHECKING:
    from torch import Tensor

    from quire_worker.arrays import Float32, Int32
    from quire_worker.ops.triton.masks import RowMasks
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

    def edit(
        self,
        batch: StepBatch,
        places: Int32,
        logits: Tensor,
        last_token: Tensor,
        changed: Changed,
        masks: RowMasks | None = None,
    ) -> Changed:
        """Let logits processors in Python change the `logits` [N, V] of their rows, on the host. `changed` has the
        logits from which rows sample in place of `logits`; returns it with those of these rows added. `places` has the
        row of each sequence, last_token [slots] the tokens that were sampled before this step, and `masks` the masks
        of a step with grammars. Waits for the current stream. A row that fails has no token left to sample, and its
        controls have the error."""
        asked = [sequence for sequence, controls in batch.controls.items() if controls.runs_python]
        rows = torch.from_numpy(places[asked].astype(np.int64)).to(logits.device)
        values = logits.index_select(0, rows).float().cpu()
        sampled = last_token.cpu().numpy()
        grammars = _StepGrammars(batch, asked, masks, rows)
        for row, sequence in zip(values.numpy(), asked, strict=True):
            self._apply(batch, sequence, row, sampled, grammars)
        if changed is None:
            nobody = torch.zeros(logits.shape[0], dtype=torch.int64, device=logits.device)
            changed = nobody, torch.empty(logits.shape, dtype=torch.float32, device=logits.device)
        address, target = changed
        target.index_copy_(0, rows, values.to(logits.device))
        # The states' addresses have been used. For sampling, any number but 0 says that the row was changed.
        return address.index_fill(0, rows, 1), target

    def _apply(self, batch: StepBatch, sequence: int, row: Float32, sampled: Int32, grammars: _StepGrammars) -> None:
        """Change one sequence's `row` of logits in place, by the host's own state of the sequence. The token that the
        sequence feeds is passed to this state first, unless the step before, in which the row was held, has done so. A
        failure is set as the error of the batch's controls, and nothing is raised; after an exception the row is
        -inf."""
        slot, told = int(batch.slot[sequence]), batch.controls[sequence]
        try:
            own = self._own(slot, told)
            if batch.fed[sequence] and not grammars.was_held(sequence):
                own.fed(int(sampled[slot]))
            grammars.apply(own, sequence, row)
            if own.failure is not None:
                told.fail(own.failure)
        except Exception as error:
            log.exception("a row's logits could not be changed", slot=slot)
            told.fail(as_slot_error(error))
            row.fill(-np.inf)

    def _own(self, slot: int, told: LogitsState) -> LogitsState:
        """Return the host's own logits processor state of a slot. The state is made anew from `told`, the batch's
        state, if that is of another sequence than before."""
        held = self._held.get(slot)
        if held is None or held[0] is not told:
            held = self._held[slot] = told, LogitsState(told.sequence, self._processors)
        return held[1]


class _StepGrammars:
    """The grammars of the rows `asked` of a step, as the device has read their masks."""

    def __init__(self, batch: StepBatch, asked: list[int], masks: RowMasks | None, rows: Tensor) -> None:
        self._batch = batch
        self._held: Int32 | None = None
        self._blocked = dict(batch.blocked)
        self._masks: dict[int, TokenMask] = {}
        if masks is None:
            return
        self._held = masks.held.cpu().numpy()
        kinds, bits, blocked = (
            each.index_select(0, rows).cpu().numpy() for each in (masks.kind, masks.allowed, masks.blocked)
        )
        stop_id = batch.stop_id
        self._blocked = {
            row: stop_id[row][stop_id[row] >= 0] for row, blocks in zip(asked, blocked, strict=True) if blocks
        }
        for sequence, kind, row in zip(asked, kinds.tolist(), bits, strict=True):
            if kind == HAS_MASK.value:
                self._masks[sequence] = TokenMask(MaskKind.BITS, 0, row.tobytes())

    def was_held(self, sequence: int) -> bool:
        """Whether the token that the sequence feeds was fed before."""
        own = self._held is not None and sequence in self._batch.constraints
        return own and bool(self._held[self._batch.slot[sequence]])  # type: ignore[index]  # it is there: own

    def apply(self, controls: LogitsState, sequence: int, row: Float32) -> None:
        """Change a row of logits by its controls. If the row has a mask, also set the tokens that its grammar forbids
        to -inf. If the greatest of the model's own logits was not finite, the first logit of such a row becomes NaN, so
        that this stays to be seen."""
        blocked, mask = self._blocked.get(sequence), self._masks.get(sequence)
        if mask is None:
            controls.apply(row, blocked)
            return
        sound = bool(np.isfinite(row.max()))
        mask.restrict(row)
        controls.apply(row, blocked, mask)
        mask.restrict(row)
        if not sound:
            row[0] = np.nan


Changed = tuple["Tensor", "Tensor"] | None
"""int64 [N], and float32 [N, V]. A row whose number is not 0 samples from the second tensor instead of its logits."""
