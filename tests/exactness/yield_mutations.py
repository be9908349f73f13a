"""Rules of rows that draw any number of tokens, broken one at a time: of acceptance, of held rows, and of credit."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from quire_common.credit import Finish
from quire_scheduler.batching.slot_table import SlotTable
from quire_worker.engine import stop_rule
from quire_worker.engine.engine import Engine
from quire_worker.engine.resident_slots import ResidentSlots
from quire_worker.engine.step_runner import StepRunner
from quire_worker.engine.step_schedule import SlotView, schedule_step
from quire_worker.engine.stop_rule import KeptTokens, finish_codes, keep_tokens
from tests.exactness.mutations import Mutation

if TYPE_CHECKING:
    from pytest import MonkeyPatch

    from quire_common.credit import Budget, Report
    from quire_worker.arrays import Bool, Int32
    from quire_worker.engine.in_flight_step import InFlightStep
    from quire_worker.engine.ports import StepOutcome
    from quire_worker.engine.step_schedule import StepSchedule
    from quire_worker.step import StepBatch

KEEP_TOKENS = "quire_worker.engine.step_runner.keep_tokens"


def drafts_kept_unseen(patch: MonkeyPatch) -> None:
    """Every draft counts as what the model drew."""

    def kept(batch: StepBatch, sampled: Int32, held: Bool | None) -> KeptTokens:
        first = np.cumsum(batch.count) - batch.drafts if len(batch.drafts) else batch.count
        for nth in range(1, sampled.shape[1]):
            rows = np.flatnonzero(batch.drafts >= nth)
            batch.token[first[rows] + nth - 1] = sampled[rows, nth - 1]
        return keep_tokens(batch, sampled, held)

    patch.setattr(KEEP_TOKENS, kept)


def wrong_draft_kept(patch: MonkeyPatch) -> None:
    """A row keeps the draws behind a wrong draft, once."""

    def kept(batch: StepBatch, sampled: Int32, held: Bool | None) -> KeptTokens:
        if sampled.shape[1] > 1:
            rows = np.flatnonzero(batch.drafts == 1)
            batch.token[(np.cumsum(batch.count) - 1)[rows]] = sampled[rows, 0]
        return keep_tokens(batch, sampled, held)

    patch.setattr(KEEP_TOKENS, kept)


def stops_missed_inside_a_row(patch: MonkeyPatch) -> None:
    """Stop ids are looked for in a row's first token alone."""

    def missed(batch: StepBatch, token: Int32, nth: int = 0) -> Any:
        finish = finish_codes(batch, token, nth)
        finish[(finish == Finish.STOP) & (nth > 0)] = Finish.NONE
        return finish

    patch.setattr(stop_rule, "finish_codes", missed)


def repetition_missed_inside_a_row(patch: MonkeyPatch) -> None:
    """An end by repetition is looked for in a row's first token alone."""
    ends = stop_rule._ends

    def missed(batch: StepBatch, token: Int32, finish: Any, skipped: Bool | None) -> Any:
        found = ends(batch, token, finish, skipped)
        if skipped is not None and len(batch.drafts):
            found[found == Finish.REPETITION] = Finish.NONE
        return found

    patch.setattr(stop_rule, "_ends", missed)


def held_rows_move_on(patch: MonkeyPatch) -> None:
    """The device goes on one position behind a row that was held."""
    remember = StepRunner._remember

    def moved(self: StepRunner, batch: StepBatch, kept: KeptTokens) -> None:
        remember(self, batch, kept)
        held = batch.sample & (kept.tokens == 0) & (kept.finish == Finish.NONE)
        self._position[batch.slot[held]] += 1

    patch.setattr(StepRunner, "_remember", moved)


def tokens_of_held_rows_told(patch: MonkeyPatch) -> None:
    """The worker reports the token that a held row would have drawn, and draws it again."""

    def told(batch: StepBatch, sampled: Int32, held: Bool | None) -> KeptTokens:
        kept = keep_tokens(batch, sampled, held)
        if held is not None:
            kept.token[held, 0] = sampled[held, 0]
        return kept

    patch.setattr(KEEP_TOKENS, told)


def held_rows_counted_twice(patch: MonkeyPatch) -> None:
    """Penalties count what a held row would have drawn."""

    def counted(batch: StepBatch, sampled: Int32, held: Bool | None) -> KeptTokens:
        for sequence, controls in batch.controls.items():
            if held is not None and held[sequence] and sampled[sequence, 0] >= 0:
                controls.fed(int(sampled[sequence, 0]))
        return keep_tokens(batch, sampled, held)

    patch.setattr(KEEP_TOKENS, counted)


def positions_of_held_rows_kept(patch: MonkeyPatch) -> None:
    """Drafts that a row tried and did not draw count as computed, so credit runs out."""
    patch.setattr(ResidentSlots, "subtract_uncomputed", lambda self, slots, positions: None)
    patch.setattr(ResidentSlots, "check_integrity", lambda self: None)


def drafts_past_the_credit(patch: MonkeyPatch) -> None:
    """Drafts are tried where the slot has no pages."""

    def scheduled(view: SlotView, budget: Budget, max_num_seqs: int) -> StepSchedule:
        found = schedule_step(view, budget, max_num_seqs)
        if view.most_drafts is None:
            return found
        tried, decodes = found.count.copy(), found.slot[: found.decodes]
        tried[: found.decodes] = np.minimum(1 + view.most_drafts[decodes], (view.bound - view.computed)[decodes])
        return replace(found, count=tried)

    patch.setattr("quire_worker.engine.step_schedule.schedule_step", scheduled)


def drafts_tried_before_min_tokens(patch: MonkeyPatch) -> None:
    """A row that may not draw stop ids yet has drafts, behind which it may."""

    def scheduled(view: SlotView, budget: Budget, max_num_seqs: int) -> StepSchedule:
        if view.most_drafts is None:
            return schedule_step(view, budget, max_num_seqs)
        every = np.full_like(view.most_drafts, view.most_drafts.max())
        return schedule_step(replace(view, most_drafts=every), budget, max_num_seqs)

    patch.setattr("quire_worker.engine.step_schedule.schedule_step", scheduled)


def tokens_of_a_row_counted_once(patch: MonkeyPatch) -> None:
    """The scheduler takes a row for one token, whatever its count."""
    append = SlotTable.append_rows

    def appended(self: SlotTable, slot: Int32, count: Int32, token: Int32) -> None:
        known = self.known_len[slot]
        append(self, slot, count, token)
        self.known_len[slot] = known + (count > 0)

    patch.setattr(SlotTable, "append_rows", appended)
    patch.setattr(SlotTable, "check_integrity", lambda self: None)


def tokens_of_rows_shifted(patch: MonkeyPatch) -> None:
    """The scheduler deals the tokens of a step out one by one."""
    append = SlotTable.append_rows

    def dealt(self: SlotTable, slot: Int32, count: Int32, token: Int32) -> None:
        append(self, slot, count, np.roll(token, 1))

    patch.setattr(SlotTable, "append_rows", dealt)


def retired_by_rows(patch: MonkeyPatch) -> None:
    """A Grant counts as retired when it is applied, though rows of a step in flight may still spoil pages."""
    patch.setattr(Engine, "_retired", lambda self: self._applied)


def schedule_kept_past_held_rows(patch: MonkeyPatch) -> None:
    """The engine keeps its schedule though a held row is to compute its position again."""
    complete = Engine._complete_step

    def completed(self: Engine, in_flight: InFlightStep, outcome: StepOutcome) -> Report:
        kept = self._scheduler._kept
        report = complete(self, in_flight, outcome)
        self._scheduler._kept = self._scheduler._kept or kept
        return report

    patch.setattr(Engine, "_complete_step", completed)


MUTATIONS = (
    Mutation(drafts_kept_unseen, {}),
    Mutation(wrong_draft_kept, {}),
    Mutation(stops_missed_inside_a_row, {}),
    Mutation(repetition_missed_inside_a_row, {}),
    Mutation(held_rows_move_on, {}),
    Mutation(tokens_of_held_rows_told, {}),
    Mutation(held_rows_counted_twice, {}),
    Mutation(drafts_tried_before_min_tokens, {}),
    Mutation(positions_of_held_rows_kept, {}),
    Mutation(drafts_past_the_credit, {}),
    Mutation(tokens_of_a_row_counted_once, {}),
    Mutation(tokens_of_rows_shifted, {}),
    Mutation(retired_by_rows, {}),
    Mutation(schedule_kept_past_held_rows, {"row_tokens": 1, "depth": 2}),
)
