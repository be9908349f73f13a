"""The stop rule: does a sequence end with the token that it just drew? Vectorised over a step's rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from quire_common.credit import Finish

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from quire_worker.engine.slots import SlotTable
    from quire_worker.step import Int32


def finish_codes(table: SlotTable, slots: Int32, tokens: Int32) -> NDArray[np.uint8]:
    """Finish per row, after the tokens were appended. A stop id that is also the last allowed token is a stop.

    min_tokens needs no look here: before it, stop ids cannot be drawn (blocked_ids).
    """
    finish = np.full(len(slots), Finish.NONE, np.uint8)
    known = table.known_len[slots]
    finish[known >= table.final_len[slots]] = Finish.LENGTH
    width = int(table.num_stop[slots].max(initial=0))
    if width:
        stopped = (table.stop_id[slots, :width] == tokens[:, None]).any(axis=1)
        finish[stopped] = Finish.STOP
    return finish


def blocked_ids(table: SlotTable, slots: Int32, samples: NDArray[np.bool_]) -> dict[int, Int32]:
    """Row -> ids that may not be drawn: stop ids of rows that have not reached min_tokens."""
    rows = np.flatnonzero(samples & (table.known_len[slots] < table.min_len[slots]) & (table.num_stop[slots] > 0))
    return {int(row): table.stop_id[slots[row], : table.num_stop[slots[row]]].copy() for row in rows}
