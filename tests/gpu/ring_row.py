"""RingRow: a row's grammar, whose masks a test leaves in the ring as the matcher does."""

from __future__ import annotations

from collections.abc import Sequence

from quire_worker.matcher.mask_ring import MaskRing
from quire_worker.matcher.row_constraint import RowConstraint
from quire_worker.sampling.token_mask import TokenMask


class _Nobody:
    """There is no process: the test leaves the masks."""

    def mask_at(self, constraint: RowConstraint, position: int) -> None:
        """Nobody asks."""

    def add_tokens(self, sampled: Sequence[tuple[RowConstraint, Sequence[int]]]) -> None:
        """The test knows."""

    def count_forced_tokens(self, count: int) -> None:
        """Nobody counts."""


class RingRow(RowConstraint):
    """Has a mask slot of its own."""

    def __init__(self, ring: MaskRing, mask_slot: int) -> None:
        self._ring = ring
        self.mask_slot, self.generation = mask_slot, 100 + mask_slot
        self.mask_source = _Nobody()

    def mask_at(self, position: int) -> TokenMask | None:
        return self._ring.mask_at(self.mask_slot, self.generation, position)

    def put(self, position: int, mask: TokenMask) -> None:
        """Leave the mask of the token at this position."""
        self._ring.put(self.mask_slot, self.generation, position, mask)
