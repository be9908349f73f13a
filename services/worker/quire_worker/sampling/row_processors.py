"""RowProcessors: the logits processors that one sequence names, run over its row. If one fails, only this sequence
fails."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from quire_common.errors import Internal
from quire_common.telemetry.logs import get_logger

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quire_common.errors import QuireError
    from quire_worker.arrays import Float32, Int32
    from quire_worker.sampling.logits_processor import LogitsProcessor

log = get_logger(__name__)


class RowProcessors:
    """The processors of one sequence, in the order of the request."""

    def __init__(self, processors: Sequence[tuple[str, LogitsProcessor]], prompt_ids: Int32) -> None:
        self._processors = processors
        self._prompt_ids = prompt_ids.view()
        self._prompt_ids.flags.writeable = False
        self._ids = np.empty(64, np.int32)
        self._count = 0

    def run(self, output: Sequence[int], logits: Float32) -> QuireError | None:
        """Replace a row of logits [V], in place, by the result of each processor in turn, up to the first that fails.
        `output` has all ids of the answer so far. If a processor raises, or returns another size, a NaN or +inf, this
        is logged, and an Internal error that names the processor is returned; the row is then useless. None: all
        succeeded."""
        output_ids = self._as_array(output)
        for name, process in self._processors:
            try:
                made = process(self._prompt_ids, output_ids, logits)
                logits[:] = np.asarray(made, np.float32).reshape(logits.shape)
                if not logits.max() < np.inf:
                    raise ValueError("the result has a NaN or +inf")
            except Exception:
                log.exception("a logits processor failed", processor=name)
                return Internal(
                    "LOGITS_PROCESSOR_FAILED",
                    f"The logits processor {name!r} failed on this request.",
                    "Leave it out, or see the worker's log and mend it.",
                    param="logits_processors",
                )
        return None

    def _as_array(self, output: Sequence[int]) -> Int32:
        """Return the output ids [n] as a read-only view of a kept array. Only ids that are new since the last call are
        copied, because an answer may be long. So the ids of an earlier call must not have changed."""
        count = len(output)
        if count > len(self._ids):
            self._ids = np.concatenate([self._ids, np.empty(max(count, len(self._ids)), np.int32)])
        self._ids[self._count : count] = output[self._count :]
        self._count = count
        ids = self._ids[:count]
        ids.flags.writeable = False
        return ids
