"""Flight: a step that was launched and has not been settled, as the host remembers it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from quire_worker.arrays import Bool, Int32, Int64


@dataclass(frozen=True, slots=True)
class InFlightStep:
    """Columns by sequence of the batch, decode rows first."""

    step: int
    applied: int
    """The Grant that was applied at its launch."""
    slot: Int32
    slot_generation: Int64
    """Who held the slot: by now it may be another."""
    count: Int32
    position: Int32
    sample: Bool
    decodes: int
    prepare_us: int
