"""Report: the results of the worker's steps. Rows are grouped by step, and each step names the Grant that was applied
at its launch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from quire.v1 import worker_pb2
from quire_common.columns import MAX_U32, NO_U8, equal_lengths, i32, i64, pack_i32, pack_i64, pack_u8, saturated_u32, u8
from quire_common.credit.grant import empty, empty_i64
from quire_common.credit.hello import Epoch, epoch_from_pb, epoch_to_pb
from quire_common.credit.logprobs import LogprobColumns, check_sum, logprobs_from_pb, logprobs_to_pb
from quire_common.credit.prompt_logprobs import PromptLogprobs, prompt_logprobs_from_pb, prompt_logprobs_to_pb
from quire_common.errors import QuireError, from_message, to_message

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


class StepTiming(NamedTuple):
    """Microseconds of one step. On the wire each is at most 2^32 - 1, which is 71.6 minutes."""

    wait: int
    prepare: int
    forward: int
    sample: int
    copy: int


def _empty_u8() -> NDArray[np.uint8]:
    return NO_U8


@dataclass(slots=True)
class Report:
    """A Report. Columns of one group have equal lengths; `token` has sum(count) entries, and there are sum(step_rows)
    rows. A move (`moved_*`) is a transfer of pages by the KV transfer agent."""

    epoch: Epoch
    first_step: int = 0
    retired: int = 0
    in_flight: int = 0
    step_applied: NDArray[np.int64] = field(default_factory=empty_i64)
    step_rows: NDArray[np.int32] = field(default_factory=empty)
    step_prefill_tokens: NDArray[np.int32] = field(default_factory=empty)
    slot: NDArray[np.int32] = field(default_factory=empty)
    count: NDArray[np.int32] = field(default_factory=empty)
    token: NDArray[np.int32] = field(default_factory=empty)
    finish: NDArray[np.uint8] = field(default_factory=_empty_u8)
    logprobs: LogprobColumns | None = None
    prefill_slot: NDArray[np.int32] = field(default_factory=empty)
    prefill_position: NDArray[np.int32] = field(default_factory=empty)
    moved_id: NDArray[np.int64] = field(default_factory=empty_i64)
    moved_status: NDArray[np.uint8] = field(default_factory=_empty_u8)
    moved_pages: NDArray[np.int32] = field(default_factory=empty)
    moved_us: NDArray[np.int32] = field(default_factory=empty)
    running: int = 0
    spare: int = 0
    stalled_slot: NDArray[np.int32] = field(default_factory=empty)
    error: list[tuple[int, QuireError]] = field(default_factory=list)
    timing: list[StepTiming] = field(default_factory=list)
    grant_arrival_us: int = 0
    draining: bool = False
    heartbeat: bool = False
    prompt_logprobs: list[PromptLogprobs] = field(default_factory=list)

    def set_state(
        self,
        *,
        retired: int,
        in_flight: int,
        running: int,
        spare: int,
        stalled_slot: NDArray[np.int32],
        grant_arrival_us: int,
        draining: bool,
    ) -> None:
        """Set the state of the worker that every Report carries. `retired` is the highest Grant all of whose earlier
        steps have completed, or an earlier one while errors of slots wait to be reported. The others are the numbers of
        steps in flight, running sequences and standby sequences (`spare`), the stalled slots, the time at which the
        newest Grant arrived (monotonic microseconds), and whether the worker drains."""
        self.retired, self.in_flight, self.running, self.spare = retired, in_flight, running, spare
        self.stalled_slot, self.grant_arrival_us, self.draining = stalled_slot, grant_arrival_us, draining

    def set_errors(self, errors: list[tuple[int, QuireError]]) -> None:
        """Set the errors of slots that have no row in a step."""
        self.error = errors

    def set_moves(
        self,
        move_id: NDArray[np.int64],
        status: NDArray[np.uint8],
        pages: NDArray[np.int32],
        us: NDArray[np.int32],
    ) -> None:
        """Set the moves that have ended, each with its status (0: all pages have moved, 1: it failed), the number of
        pages that arrived, and its duration in microseconds."""
        self.moved_id, self.moved_status, self.moved_pages, self.moved_us = move_id, status, pages, us

    @property
    def steps(self) -> int:
        """Number of steps in the Report."""
        return len(self.step_applied)


def encode_report(report: Report) -> worker_pb2.Report:
    """Encode a Report. Groups of columns without rows are left out. Timings outside uint32 are brought within it."""
    message = worker_pb2.Report(
        epoch=epoch_to_pb(report.epoch),
        first_step=report.first_step,
        retired=report.retired,
        in_flight=report.in_flight,
        running=report.running,
        spare=report.spare,
        error=[worker_pb2.SlotError(slot=slot, error=to_message(error)) for slot, error in report.error],
        grant_arrival_us=report.grant_arrival_us,
        draining=report.draining,
        heartbeat=report.heartbeat,
    )
    for timing in report.timing:
        fits = min(timing) >= 0 and max(timing) <= MAX_U32
        wait, prepare, forward, sample, copy = timing if fits else map(saturated_u32, timing)
        message.timing.add(wait=wait, prepare=prepare, forward=forward, sample=sample, copy=copy)
    # A group is written where any of its columns has rows: the receiver refuses columns that do not fit together.
    if len(report.step_applied) or len(report.step_rows) or len(report.step_prefill_tokens):
        message.step_applied = pack_i64(report.step_applied)
        message.step_rows = pack_i32(report.step_rows)
        message.step_prefill_tokens = pack_i32(report.step_prefill_tokens)
    if len(report.slot) or len(report.token) or len(report.count) or len(report.finish):
        message.slot = pack_i32(report.slot)
        message.count = pack_i32(report.count)
        message.token = pack_i32(report.token)
        message.finish = pack_u8(report.finish)
    if report.logprobs is not None:
        message.logprobs.CopyFrom(logprobs_to_pb(report.logprobs))
    if len(report.prefill_slot) or len(report.prefill_position):
        message.prefill_slot = pack_i32(report.prefill_slot)
        message.prefill_position = pack_i32(report.prefill_position)
    if len(report.moved_id) or len(report.moved_status) or len(report.moved_pages) or len(report.moved_us):
        message.moved_id = pack_i64(report.moved_id)
        message.moved_status = pack_u8(report.moved_status)
        message.moved_pages = pack_i32(report.moved_pages)
        message.moved_us = pack_i32(report.moved_us)
    if len(report.stalled_slot):
        message.stalled_slot = pack_i32(report.stalled_slot)
    if report.prompt_logprobs:
        message.prompt_logprobs.CopyFrom(prompt_logprobs_to_pb(report.prompt_logprobs))
    return message


def decode_report(message: worker_pb2.Report) -> Report:
    """Decode a Report. Raises InvalidArgument if columns of one group differ in length, if `step_rows` and `count` do
    not add up to the rows and tokens, if the logprobs are malformed, or if a column's bytes are no multiple of its
    element's size. Slots, steps and timings are not checked. The columns are read-only."""
    report = Report(
        epoch=epoch_from_pb(message.epoch),
        first_step=message.first_step,
        retired=message.retired,
        in_flight=message.in_flight,
        step_applied=i64(message.step_applied, "step_applied"),
        step_rows=i32(message.step_rows, "step_rows"),
        step_prefill_tokens=i32(message.step_prefill_tokens, "step_prefill_tokens"),
        slot=i32(message.slot, "slot"),
        count=i32(message.count, "count"),
        token=i32(message.token, "token"),
        finish=u8(message.finish, "finish"),
        logprobs=logprobs_from_pb(message.logprobs) if message.HasField("logprobs") else None,
        prefill_slot=i32(message.prefill_slot, "prefill_slot"),
        prefill_position=i32(message.prefill_position, "prefill_position"),
        moved_id=i64(message.moved_id, "moved_id"),
        moved_status=u8(message.moved_status, "moved_status"),
        moved_pages=i32(message.moved_pages, "moved_pages"),
        moved_us=i32(message.moved_us, "moved_us"),
        running=message.running,
        spare=message.spare,
        stalled_slot=i32(message.stalled_slot, "stalled_slot"),
        error=[(e.slot, from_message(e.error)) for e in message.error],
        timing=[StepTiming(t.wait, t.prepare, t.forward, t.sample, t.copy) for t in message.timing],
        grant_arrival_us=message.grant_arrival_us,
        draining=message.draining,
        heartbeat=message.heartbeat,
        prompt_logprobs=prompt_logprobs_from_pb(message.prompt_logprobs) if message.HasField("prompt_logprobs") else [],
    )
    prefill_tokens = report.step_prefill_tokens
    equal_lengths("step", applied=report.step_applied, rows=report.step_rows, prefill_tokens=prefill_tokens)
    rows = equal_lengths("row", slot=report.slot, count=report.count, finish=report.finish)
    equal_lengths("prefill", slot=report.prefill_slot, position=report.prefill_position)
    status, pages = report.moved_status, report.moved_pages
    equal_lengths("moved", id=report.moved_id, status=status, pages=pages, us=report.moved_us)
    check_sum("step_rows", report.step_rows, rows)
    check_sum("count", report.count, len(report.token))
    return report
