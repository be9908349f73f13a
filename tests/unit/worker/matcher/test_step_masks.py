"""The masks of a step with drafts: forced tokens are proposed, and samples without a mask are not kept."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest

from quire_common.sequence import Sequence, Stop
from quire_worker.matcher.row_constraint import RowConstraint
from quire_worker.matcher.step_masks import ForcedTokens, fetch_masks
from quire_worker.sampling.param_rows import param_rows
from quire_worker.sampling.token_mask import TokenMask
from quire_worker.step import StepBatch, samples_of
from tests.fakes.worker.local_matcher import LocalMatcher
from tests.fakes.worker.token_masks import mask_of
from tests.unit.worker.matcher.letter_rows import BACKEND, PROMPT, VOCAB, A, B, C, allowed, keep, open_row

if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Sequence as Many

    from quire_worker.arrays import Int32

EOS = (1, 2)


class MasksByPosition(RowConstraint):
    """Has a mask of the given tokens at each position that is named, and none at others."""

    def __init__(self, allowed_at: Mapping[int, Many[int]]) -> None:
        self._allowed_at = allowed_at

    def mask_at(self, position: int) -> TokenMask | None:
        found = self._allowed_at.get(position)
        return None if found is None else mask_of(VOCAB, EOS, found)


class CountedDrafts:
    """Proposes 40, 41, 42 and so on for each sequence."""

    constrained_only = False

    def propose(self, batch: StepBatch) -> Int32:
        width = int(batch.drafts.max(initial=0))
        return np.tile(np.arange(40, 40 + width, dtype=np.int32), (len(batch.drafts), 1))


def a_step(drafts: list[int], constraints: Mapping[int, RowConstraint], prompts: Many[int] = ()) -> StepBatch:
    """Decode rows at the position 10, 11, 12 and so on, with room for so many drafts; then the last prefill chunks of
    prompts of so many tokens."""
    decodes, count = len(drafts), np.array([*(1 + each for each in drafts), *prompts], np.int32)
    sequences = len(count)
    return StepBatch(
        token=np.zeros(int(count.sum()), np.int64),
        count=count,
        position=np.array([*range(10, 10 + decodes), *(0 for _ in prompts)], np.int32),
        page_table=np.zeros((sequences, 1), np.int32),
        sample=np.ones(sequences, np.bool_),
        params=param_rows(sequences),
        logprobs=np.full(sequences, -1, np.int32),
        constraints=constraints,
        drafts=np.array([*drafts, *(0 for _ in prompts)], np.int32) if any(drafts) else np.empty(0, np.int32),
    )


@pytest.mark.parametrize(
    ("masks", "proposed"),
    [
        ({11: [5], 12: [6], 13: [7], 14: [8]}, [5, 6, 7]),
        ({11: [5], 12: [6, 7], 13: [8]}, [5, -1, -1]),
        ({11: [5], 13: [7]}, [5, -1, -1]),
        ({12: [6]}, [-1, -1, -1]),
        ({11: [5], 12: [EOS[0]]}, [5, -1, -1]),
    ],
    ids=["as many as fit", "up to a choice", "up to a missing mask", "no first mask", "no end"],
)
def test_forced_tokens_are_proposed(masks: dict[int, list[int]], proposed: list[int]) -> None:
    drafter = ForcedTokens()
    found = drafter.propose(a_step([3], {0: MasksByPosition(masks)}))
    assert found.tolist() == [proposed] and found.dtype == np.int32 and drafter.constrained_only


def test_each_sequence_has_no_more_drafts_than_it_may() -> None:
    forced = MasksByPosition({position: [position] for position in range(30)})
    found = ForcedTokens().propose(a_step([3, 1, 0, 2], {0: forced, 1: forced, 2: forced}, prompts=[4]))
    assert found.tolist() == [[11, 12, 13], [12, -1, -1], *[[-1] * 3] * 3]


def test_other_drafter_proposes_for_sequences_without_a_grammar() -> None:
    drafter = ForcedTokens(CountedDrafts())
    constraints = {0: MasksByPosition({11: [5]}), 2: MasksByPosition({})}
    found = drafter.propose(a_step([3, 2, 2], constraints))
    assert found[0].tolist() == [5, -1, -1] and found[1, :2].tolist() == [40, 41] and found[2, 0] == -1
    assert not drafter.constrained_only


def test_masks_of_all_samples_are_fetched() -> None:
    masks = {position: [position] for position in range(5, 20)}
    batch = a_step([2, 0, 1], {0: MasksByPosition(masks), 2: MasksByPosition(masks), 3: MasksByPosition(masks)}, [6])
    found = fetch_masks(batch, samples_of(batch))
    assert {sample: mask.token for sample, mask in found.masks.items()} == {0: 11, 1: 12, 2: 13, 4: 13, 5: 14, 6: 6}
    assert (found.held, found.missing) == ((), ())


def test_sequence_is_held_only_for_want_of_its_first_mask() -> None:
    constraints = {0: MasksByPosition({12: [5], 13: [5]}), 1: MasksByPosition({12: [5], 14: [5]})}
    batch = a_step([2, 2], constraints)
    found = fetch_masks(batch, samples_of(batch))
    assert found.held == (0,), "its second and third mask are of no use"
    assert sorted(found.masks) == [3, 5] and found.missing == (4,)


def test_step_without_drafts_needs_one_mask_of_each_sequence() -> None:
    batch = a_step([0, 0], {1: MasksByPosition({12: [5]})})
    found = fetch_masks(batch, samples_of(batch))
    assert list(found.masks) == [1] and (found.held, found.missing) == ((), ())
    batch.constraints = {0: MasksByPosition({}), 1: MasksByPosition({})}
    assert fetch_masks(batch, samples_of(batch)).held == (0, 1)


def test_finished_sequence_finds_no_lookahead_masks() -> None:
    matcher = LocalMatcher(BACKEND, VOCAB, row_tokens=4)
    row = open_row(matcher, text='start: "ABCABCABC"')
    keep(row, A)
    assert [allowed(row, place) for place in (1, 2, 3)] == [[B], [C], [A]]
    row.finish()
    assert [row.mask_at(PROMPT + place) for place in range(4)] == [None] * 4


def test_sequence_that_continues_after_preemption_has_masks_again() -> None:
    """It is another row of the same sequence."""
    matcher = LocalMatcher(BACKEND, VOCAB, row_tokens=4)
    first = open_row(matcher, text='start: "ABCABCABC"')
    first.finish()
    second = matcher.client.open_sequence(
        Sequence(np.zeros(PROMPT, np.int32), Stop(20), output_ids=np.array([A, B], np.int32)), first.grammar
    )
    assert [allowed(second, place) for place in (2, 3)] == [[C], [A]]
