"""ControlSheets: the control sheets of sequences, on the device, by slot.

A sheet is made when its sequence first draws, and is the device's from then on: the host never reads it back. It stays
until the slot is another's, so a step that was launched before an end was known still finds it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from quire_worker.sampling.control_sheet import control_sheet

if TYPE_CHECKING:
    from torch import Tensor

    from quire_worker.sampling.row_controls import RowControls
    from quire_worker.step import StepBatch


class ControlSheets:
    """Belongs to the model thread. Uploads go to the current stream."""

    def __init__(self, device: torch.device, vocab_size: int) -> None:
        self._device = device
        self._vocab_size = vocab_size
        self._held: dict[int, tuple[RowControls, Tensor]] = {}

    @property
    def num_bytes(self) -> int:
        """Memory of the device that sheets take."""
        return sum(sheet.nbytes for _, sheet in self._held.values())

    def addresses(self, batch: StepBatch) -> dict[int, int]:
        """Sequence -> address of its sheet, of those whose logits the device is to change."""
        found = {}
        for sequence, controls in batch.controls.items():
            if controls.changes_logits and not controls.runs_python:
                found[sequence] = self._sheet(int(batch.slot[sequence]), controls).data_ptr()
        return found

    def clear(self) -> None:
        """All sequences are gone, and no step is in flight."""
        self._held.clear()

    def _sheet(self, slot: int, controls: RowControls) -> Tensor:
        held = self._held.get(slot)
        if held is not None and held[0] is controls:
            return held[1]
        sheet = torch.from_numpy(control_sheet(controls.sequence, self._vocab_size))
        if self._device.type == "cuda":
            sheet = sheet.pin_memory().to(self._device, non_blocking=True)
        self._held[slot] = controls, sheet
        return sheet
