"""DeviceMasks: the masks of rows with grammars on a device, and the positions of these rows.

The host launches a step before it knows whether rows of the step before were held. So it uploads the greatest possible
position of each row. The device keeps the right position of each slot, and replaces the uploaded one before the model
runs. All rows with grammars run in steps whose size has the flag `masked`, which update these positions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from quire_worker.cuda.masks.ring_mapping import RingMapping
from quire_worker.ops.triton.masks import RowMasks, fetch_masks, place_rows

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from quire_worker.matcher.mask_ring import MaskRing


class DeviceMasks:
    """Serves steps of at most `sequences` sequences, on the current stream. Raises ConfigError if the ring cannot be
    mapped."""

    def __init__(self, ring: MaskRing, device: torch.device, slots: int, sequences: int) -> None:
        self._mapping = RingMapping(ring, device)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]  # torch's
        self._known = torch.zeros(slots, dtype=torch.int32, device=device)
        self._held = torch.zeros(slots, dtype=torch.int32, device=device)
        self._allowed = torch.zeros((sequences, ring.words), dtype=torch.int32, device=device)
        self._kind = torch.zeros(sequences, dtype=torch.int32, device=device)
        self._arrived = torch.zeros(sequences, dtype=torch.int32, device=device)

    def place_rows(self, views: dict[str, Tensor], splits: Tensor | None) -> RowMasks:
        """Write the right positions to the uploaded columns `views` of a step, for rows that decode by a grammar, and
        correct what follows from them: whether a row feeds a token, is its sequence's last or has blocked stop ids, and
        the ends of KV splits. Returns the tensors that `fetch` needs. `splits` as in TritonPlan."""
        sequences = len(views["mask_slot"])
        masks = RowMasks(
            mask_slot=views["mask_slot"],
            generation=views["generation"],
            allowed=self._allowed[:sequences],
            kind=self._kind[:sequences],
            arrived=self._arrived[:sequences],
            bound=views["bound"],
            min_len=views["min_len"],
            blocked=views["blocked"],
            last_row=views["last_row"],
            row_position=views["row_position"],
            known=self._known,
            held=self._held,
        )
        place_rows(masks, views, splits)
        return masks

    def fetch(self, masks: RowMasks, views: dict[str, Tensor], stop_id: Tensor) -> None:
        """Launch the kernel that reads the step's masks, on a stream of its own, so that other kernels run meanwhile.
        `await_fetch` makes later kernels wait for it. On the CPU it runs at once. Stop ids are no longer blocked in
        rows whose grammar allows nothing else."""
        if self._stream is None:
            fetch_masks(masks, self._mapping.ring, views["sample_position"], stop_id)
            return
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            fetch_masks(masks, self._mapping.ring, views["sample_position"], stop_id)

    def await_fetch(self) -> None:
        """Make kernels that are launched from now on wait for the masks."""
        if self._stream is not None:
            torch.cuda.current_stream().wait_stream(self._stream)

    def reset(self, poll: Callable[[Callable[[], bool]], None]) -> None:
        """Wait for the reading kernel of a launch that failed, and set its counters of ended programs to 0. Nothing may
        be in flight on the main stream. `poll` calls its argument until this returns True; what it raises is raised."""
        if self._stream is None:
            self._arrived.zero_()
            return
        poll(self._stream.query)
        with torch.cuda.stream(self._stream):
            self._arrived.zero_()
        poll(self._stream.query)

    def close(self) -> None:
        """Give the ring back; no step may be in flight. Idempotent."""
        self._mapping.close()
