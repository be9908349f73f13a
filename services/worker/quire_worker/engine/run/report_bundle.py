"""ReportBundle: Reports that follow closely and travel as one.

A step names the Grant that was applied at its launch, so each token is still assigned to the right request after a
merge. The other contents name no step, so two rules apply to them. Prefill progress is merged only among steps of one
Grant. A Report with errors travels by itself, since errors belong to whichever sequence held the slot under the Grant
that this Report retires.
"""

from __future__ import annotations

from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

from quire_common.credit import Report
from quire_common.credit.logprobs import join_logprobs

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_REPORTS = 64
MAX_BYTES = 1 << 20
ROW_COLUMNS = ("slot", "count", "token", "finish", "prefill_slot", "prefill_position")
STEP_COLUMNS = ("step_applied", "step_rows", "step_prefill_tokens")
MOVE_COLUMNS = ("moved_id", "moved_status", "moved_pages", "moved_us")


class ReportBundle:
    """Reports that will travel as one: call `has_room_for`, then `add`. `take_report` merges them and empties the
    bundle."""

    def __init__(self) -> None:
        self._reports: list[Report] = []
        self._bytes = 0
        self._grants: set[int] = set()
        self._prefills = False

    def __len__(self) -> int:
        return len(self._reports)

    def has_room_for(self, report: Report) -> bool:
        """Whether the Report may be merged with those in the bundle; always, if the bundle is empty. They must have the
        same epoch and no errors; if one has prefill progress, the steps of all must belong to one Grant. At most 64
        Reports or 1 MiB go together."""
        if not self._reports:
            return True
        last = self._reports[-1]
        if last.epoch != report.epoch or last.error or report.error:
            return False
        if len(self._reports) == MAX_REPORTS or self._bytes + size_of(report) > MAX_BYTES:
            return False
        return not (self._prefills or len(report.prefill_slot)) or len(self._grants | _grants(report)) <= 1

    def add(self, report: Report) -> None:
        """Append a Report to the bundle, without a check."""
        self._reports.append(report)
        self._bytes += size_of(report)
        self._grants |= _grants(report)
        self._prefills |= bool(len(report.prefill_slot))

    def take_report(self) -> Report:
        """Merge the bundle's Reports, of which there must be one at least, and empty the bundle."""
        merged = merge_reports(self._reports)
        self._reports, self._bytes, self._grants, self._prefills = [], 0, set(), False
        return merged


def size_of(report: Report) -> int:
    """Estimate the bytes of a Report's columns: steps, rows, prefill progress and logprobs."""
    tops = 0 if report.logprobs is None else 16 * len(report.logprobs) + 8 * len(report.logprobs.top_id)
    tops += sum(16 * len(c.logprobs) + 8 * len(c.logprobs.top_id) for c in report.prompt_logprobs)
    return 64 * report.steps + 16 * len(report.slot) + 8 * len(report.prefill_slot) + tops


def _grants(report: Report) -> set[int]:
    return set(report.step_applied.tolist())


def merge_reports(reports: Sequence[Report]) -> Report:
    """Join Reports, in order, into one: columns, errors and timings are concatenated; acknowledgements, counts and
    stalled slots are the last Report's. `first_step` is that of the first Report with steps, else of the last Report. A
    single Report is returned as it is."""
    if len(reports) == 1:
        return reports[0]
    last, first_tokens = reports[-1], accumulate((len(report.token) for report in reports), initial=0)
    columns = {
        name: np.concatenate([getattr(r, name) for r in reports]) for name in ROW_COLUMNS + STEP_COLUMNS + MOVE_COLUMNS
    }
    return Report(
        epoch=last.epoch,
        first_step=next((r.first_step for r in reports if r.steps), last.first_step),
        retired=last.retired,
        in_flight=last.in_flight,
        logprobs=join_logprobs(zip(first_tokens, (report.logprobs for report in reports), strict=False)),
        running=last.running,
        spare=last.spare,
        stalled_slot=last.stalled_slot,
        error=[error for r in reports for error in r.error],
        timing=[timing for r in reports for timing in r.timing],
        grant_arrival_us=last.grant_arrival_us,
        draining=last.draining,
        heartbeat=False,
        prompt_logprobs=[chunk for r in reports for chunk in r.prompt_logprobs],
        **columns,
    )
