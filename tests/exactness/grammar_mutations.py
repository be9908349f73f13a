"""Rules of sequences with grammars, broken one at a time: of masks, of held rows, and of replays."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from quire_worker.engine import step_completion, step_runner
from quire_worker.engine.step_runner import StepRunner
from quire_worker.matcher import matcher_client, step_masks
from quire_worker.matcher.lookahead_grammar import LookaheadGrammar
from quire_worker.matcher.mask_ring import MaskRing
from quire_worker.matcher.matcher_client import MatcherClient
from quire_worker.matcher.row_constraint import RowConstraint
from quire_worker.matcher.wire import pack_open
from quire_worker.sampling.token_mask import TokenMask
from tests.exactness.mutations import Mutation

if TYPE_CHECKING:
    from pytest import MonkeyPatch

    from quire_worker.arrays import Bool
    from quire_worker.engine.in_flight_step import InFlightStep
    from quire_worker.engine.ports import StepOutcome
    from quire_worker.engine.report_draft import StepRows
    from quire_worker.engine.resident_slots import ResidentSlots
    from quire_worker.engine.stop_rule import KeptTokens
    from quire_worker.matcher.wire import OpenMessage
    from quire_worker.side_process.frames import Frame
    from quire_worker.step import StepBatch, StepOutput


def mask_of_the_position_before(patch: MonkeyPatch) -> None:
    """A row whose mask has not come takes the one of the position before."""
    read = MaskRing.mask_at

    def found(self: MaskRing, mask_slot: int, generation: int, position: int) -> TokenMask | None:
        return read(self, mask_slot, generation, position) or read(self, mask_slot, generation, position - 1)

    patch.setattr(MaskRing, "mask_at", found)


def mask_of_another_slot(patch: MonkeyPatch) -> None:
    """A row whose mask has not come takes one from the next mask slot."""
    read = MatcherClient.mask_at

    def found(self: MatcherClient, constraint: RowConstraint, position: int) -> TokenMask | None:
        own = read(self, constraint, position)
        other = self._by_mask_slot.get((constraint.mask_slot + 1) % self._ring.mask_slots)
        if own is not None or other is None:
            return own
        return read(self, other, other.first_position + len(other.output))

    patch.setattr(MatcherClient, "mask_at", found)


def mask_of_the_sequence_before(patch: MonkeyPatch) -> None:
    """A row takes any mask of its position in its mask slot, also that of the sequence before."""
    read = MaskRing.mask_at

    def found(self: MaskRing, mask_slot: int, generation: int, position: int) -> TokenMask | None:
        index, _ = self._entry_of(mask_slot, position)
        return read(self, mask_slot, int(self._stamps[index]) >> 32, position)

    patch.setattr(MaskRing, "mask_at", found)


def row_without_a_mask_is_not_held(patch: MonkeyPatch) -> None:
    """A row whose mask has not come keeps the token that was sampled without one."""
    held = StepRunner._held

    def kept(self: StepRunner, batch: StepBatch, output: StepOutput | None) -> Bool | None:
        return held(self, batch, None if output is None else replace(output, held=()))

    patch.setattr(StepRunner, "_held", kept)


def held_row_is_told_to_the_matcher(patch: MonkeyPatch) -> None:
    """The matcher consumes a token for each row that ran, held or not."""
    tell = step_runner.send_tokens_to_matcher

    def told(batch: StepBatch, kept: KeptTokens) -> None:
        tokens = kept.token.copy()
        for sequence in batch.constraints:
            if tokens[sequence, 0] < 0 and not kept.finish[sequence]:
                tokens[sequence, 0] = batch.token[sequence]
        tell(batch, kept._replace(token=tokens))

    patch.setattr(step_runner, "send_tokens_to_matcher", told)


def lost_process_is_not_replayed(patch: MonkeyPatch) -> None:
    """The next process begins each grammar anew, at the position where its sequence is."""

    def packed(opened: OpenMessage) -> Frame:
        position = opened.position + len(opened.output_ids)
        return pack_open(replace(opened, position=position, output_ids=()))

    patch.setattr(matcher_client, "pack_open", packed)


def last_token_lost_in_the_replay(patch: MonkeyPatch) -> None:
    """A replay leaves out the token that was sampled last."""

    def packed(opened: OpenMessage) -> Frame:
        ids, moved = opened.output_ids[:-1], len(opened.output_ids) > 0
        return pack_open(replace(opened, position=opened.position + moved, output_ids=ids))

    patch.setattr(matcher_client, "pack_open", packed)


def mask_slots_kept_at_the_end(patch: MonkeyPatch) -> None:
    """A sequence that leaves keeps its mask slot."""
    patch.setattr(MatcherClient, "close_sequence", lambda self, constraint: None)


def draft_without_its_mask_is_kept(patch: MonkeyPatch) -> None:
    """A token that was sampled behind a forced one, before its mask had come, counts."""
    fetch = step_masks.fetch_masks
    patch.setattr(
        "quire_worker.paced.runner.fetch_masks", lambda batch, samples: fetch(batch, samples)._replace(missing=())
    )


def forced_tokens_consumed_twice(patch: MonkeyPatch) -> None:
    """A grammar consumes a forced token ahead, and again when the token is sampled."""
    accept = LookaheadGrammar._accept_token

    def accepted(self: LookaheadGrammar, token: int) -> None:
        ahead = len(self._masks) > 1
        accept(self, token)
        if ahead:
            self._grammar.accept_tokens([token])

    patch.setattr(LookaheadGrammar, "_accept_token", accepted)


def masks_ahead_at_the_position_before(patch: MonkeyPatch) -> None:
    """A mask that is computed ahead is written for the token before."""
    look_ahead = LookaheadGrammar.look_ahead

    def looked(self: LookaheadGrammar) -> tuple[int, TokenMask] | None:
        found = look_ahead(self)
        return None if found is None else (found[0] - 1, found[1])

    patch.setattr(LookaheadGrammar, "look_ahead", looked)


def finished_sequences_find_masks_ahead(patch: MonkeyPatch) -> None:
    """A row in flight of a sequence that has ended samples on, and the matcher hears of it."""
    patch.setattr(RowConstraint, "finish", lambda self: None)


def positions_of_removed_drafts_kept(patch: MonkeyPatch) -> None:
    """Drafts that were scheduled, and for which no token is forced, count as computed, so credit runs out."""
    complete = step_completion.complete_step

    def completed(residents: ResidentSlots, in_flight: InFlightStep, outcome: StepOutcome) -> StepRows:
        return complete(residents, replace(in_flight, has_drafts=False), outcome)

    patch.setattr("quire_worker.engine.engine.complete_step", completed)


MUTATIONS = (
    Mutation(draft_without_its_mask_is_kept, {}),
    Mutation(forced_tokens_consumed_twice, {}),
    Mutation(masks_ahead_at_the_position_before, {}),
    Mutation(finished_sequences_find_masks_ahead, {}),
    Mutation(positions_of_removed_drafts_kept, {}),
    Mutation(mask_of_the_position_before, {}),
    Mutation(mask_of_another_slot, {}),
    Mutation(mask_of_the_sequence_before, {}),
    Mutation(row_without_a_mask_is_not_held, {}),
    Mutation(held_row_is_told_to_the_matcher, {}),
    Mutation(lost_process_is_not_replayed, {}),
    Mutation(last_token_lost_in_the_replay, {}),
    Mutation(mask_slots_kept_at_the_end, {}),
)
