"""The batch rule, by example and by property."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quire_common.credit import Budget
from quire_worker.engine.step_schedule import MAX_SCORE_BYTES, SlotView, StepSchedule, schedule_step, stalled_slots

UNORDERED = 2**31 - 1


def view(
    *slots: tuple[int, int, int],
    keys: list[int] | None = None,
    ranks: list[int] | None = None,
    scored: list[int] | None = None,
) -> SlotView:
    """Slots as (computed, prefill_len, ceiling), all runnable, none near its end."""
    computed, prefill, ceiling = (np.array(column, np.int32) for column in zip(*slots, strict=True))
    n = len(slots)
    order_key = np.array(keys if keys is not None else range(n), np.int64)
    return SlotView(
        runnable=np.ones(n, np.bool_),
        computed=computed,
        prefill_len=prefill,
        decoding=computed >= prefill,
        most_drafts=None,
        ceiling=ceiling,
        bound=np.full(n, 1000, np.int32),
        by_key=np.argsort(order_key, kind="stable"),
        order_key=order_key,
        prefill_rank=np.array(ranks if ranks is not None else [UNORDERED] * n, np.int32),
        scored=np.array(scored if scored is not None else [0] * n, np.int32),
    )


def pairs(choice: StepSchedule) -> list[tuple[int, int]]:
    assert choice.num_decode_tokens == choice.count[: choice.decodes].sum()
    return list(zip(choice.slot.tolist(), choice.count.tolist(), strict=True))


def test_decodes_come_first_and_prefill_takes_what_is_left() -> None:
    slots = view((0, 50, 100), (10, 5, 100), (20, 5, 100))
    choice = schedule_step(slots, Budget(22, 100, 100, 4), max_num_seqs=8)
    assert pairs(choice) == [(1, 1), (2, 1), (0, 20)]
    assert choice.decodes == 2


def test_prefill_beside_decoders_is_bounded_only_where_there_are_decoders() -> None:
    budget = Budget(100, 8, 100, 4)
    assert pairs(schedule_step(view((0, 50, 100), (10, 5, 100)), budget, 8)) == [(1, 1), (0, 8)]
    assert pairs(schedule_step(view((0, 50, 100)), budget, 8)) == [(0, 50)]


def test_at_most_max_num_seqs_decode_lowest_order_key_first() -> None:
    slots = view((9, 5, 99), (9, 5, 99), (9, 5, 99), keys=[3, 1, 2])
    assert pairs(schedule_step(slots, Budget(100, 0, 8, 1), max_num_seqs=2)) == [(1, 1), (2, 1)]


def test_prefill_goes_in_the_schedulers_order_then_by_key() -> None:
    slots = view((0, 9, 99), (0, 9, 99), (0, 9, 99), (0, 9, 99), keys=[3, 2, 1, 0], ranks=[1, UNORDERED, 0, UNORDERED])
    assert [slot for slot, _ in pairs(schedule_step(slots, Budget(99, 0, 99, 9), 8))] == [2, 0, 3, 1]


def with_drafts(slots: SlotView, *most: int) -> SlotView:
    """Return the slots with these most drafts of their rows."""
    return dataclasses.replace(slots, most_drafts=np.array(most, np.int32))


def test_rows_have_as_many_drafts_as_they_may() -> None:
    slots = with_drafts(view((9, 5, 99), (9, 5, 99), (9, 5, 99)), 7, 0, 3)
    assert pairs(schedule_step(slots, Budget(100, 100, 100, 4), 8)) == [(0, 8), (1, 1), (2, 4)]


def test_drafts_are_bounded_by_credit_and_by_the_end_of_the_sequence() -> None:
    slots = with_drafts(view((9, 5, 10), (9, 5, 12), (9, 5, 99)), 7, 7, 7)
    slots.bound[2] = 14
    assert pairs(schedule_step(slots, Budget(100, 100, 100, 4), 8)) == [(0, 1), (1, 3), (2, 5)]


def test_drafts_share_what_is_left_among_the_rows_that_may_have_some() -> None:
    """Neither a row without drafts nor one without credit for any has a share."""
    slots = with_drafts(view((9, 5, 99), (9, 5, 99), (9, 5, 99), (9, 5, 10)), 7, 0, 7, 7)
    assert pairs(schedule_step(slots, Budget(11, 100, 100, 4), 8)) == [(0, 4), (1, 1), (2, 4), (3, 1)]
    assert pairs(schedule_step(slots, Budget(5, 100, 100, 4), 8)) == [(0, 1), (1, 1), (2, 1), (3, 1)]


def test_prompts_come_before_drafts() -> None:
    slots = with_drafts(view((9, 5, 99), (0, 20, 99)), 7, 7)
    assert pairs(schedule_step(slots, Budget(24, 100, 100, 4), 8)) == [(0, 4), (1, 20)]


def test_partial_prefills_are_bounded_and_whole_ones_pass_them() -> None:
    slots = view((0, 50, 99), (0, 50, 99), (0, 4, 99))
    assert pairs(schedule_step(slots, Budget(100, 0, 10, 1), 8)) == [(0, 10), (2, 4)]
    assert pairs(schedule_step(slots, Budget(100, 0, 10, 2), 8)) == [(0, 10), (1, 10), (2, 4)]


def test_a_slot_without_credit_stalls_and_costs_the_others_nothing() -> None:
    slots = view((9, 5, 9), (9, 5, 10), (3, 8, 3), (3, 8, 6))
    assert pairs(schedule_step(slots, Budget(100, 100, 100, 1), 8)) == [(1, 1), (3, 3)]
    assert stalled_slots(slots, 8).tolist() == [0, 2]


def test_a_spare_takes_the_row_that_a_slot_without_credit_leaves_and_gives_it_back() -> None:
    slots = view((9, 5, 99), (9, 5, 9), (9, 5, 99), (9, 5, 99), keys=[0, 1, 3, 2])
    assert pairs(schedule_step(slots, Budget(100, 0, 8, 1), max_num_seqs=2)) == [(0, 1), (3, 1)]
    slots.ceiling[1] = 10
    assert pairs(schedule_step(slots, Budget(100, 0, 8, 1), max_num_seqs=2)) == [(0, 1), (1, 1)]


def test_a_spare_that_has_prefilled_is_not_stalled_whatever_its_credit() -> None:
    slots = view((9, 5, 9), (9, 5, 10), (9, 5, 9), (3, 5, 3), keys=[0, 1, 2, 3])
    assert stalled_slots(slots, max_num_seqs=2).tolist() == [0, 3]
    assert stalled_slots(slots, max_num_seqs=3).tolist() == [0, 2, 3]


def test_a_sequence_at_its_end_neither_runs_nor_stalls() -> None:
    slots = view((9, 5, 99), (9, 5, 99))
    slots.bound[0] = 9
    assert pairs(schedule_step(slots, Budget(100, 0, 8, 1), max_num_seqs=2)) == [(1, 1)]
    slots.ceiling[:] = 9
    assert stalled_slots(slots, 8).tolist() == [1]


def test_nobody_able_is_an_empty_step() -> None:
    choice = schedule_step(view((4, 4, 4)), Budget(100, 100, 100, 1), 8)
    assert pairs(choice) == [] and choice.decodes == 0


def test_prompt_logprobs_of_a_step_fit_a_report() -> None:
    """40,000 tokens with 256 alternatives each are 79 MiB, of which gRPC carries 64: the run of all would end."""
    slots = view((0, 30_000, 60_000), (0, 10_000, 60_000), (0, 20_000, 60_000), scored=[257, 257, 0])
    slots.bound[:] = 60_000
    choice = schedule_step(slots, Budget(60_000, 0, 60_000, 9), max_num_seqs=8)
    counts = dict(pairs(choice))
    assert counts.pop(2) == 20_000, "a prompt that asks for none has its tokens all the same"
    assert counts == {0: MAX_SCORE_BYTES // (16 + 8 * 257)}


def test_a_step_takes_as_many_prompt_logprobs_as_come_with_few_alternatives() -> None:
    slots = view((0, 16_384, 60_000), scored=[21])
    slots.bound[:] = 60_000
    assert pairs(schedule_step(slots, Budget(16_384, 0, 16_384, 1), max_num_seqs=8)) == [(0, 16_384)]


@st.composite
def views(draw: st.DrawFn) -> SlotView:
    n = draw(st.integers(1, 12))
    column = st.lists(st.integers(0, 40), min_size=n, max_size=n)
    computed, prefill, ceiling, bound = (np.array(draw(column), np.int32) for _ in range(4))
    order_key = np.array(draw(st.lists(st.integers(-5, 5), min_size=n, max_size=n)), np.int64)
    return SlotView(
        runnable=np.array(draw(st.lists(st.booleans(), min_size=n, max_size=n))),
        computed=computed,
        prefill_len=prefill,
        decoding=computed >= prefill,
        most_drafts=None,
        ceiling=ceiling,
        bound=np.maximum(bound, prefill),
        by_key=np.argsort(order_key, kind="stable"),
        order_key=order_key,
        prefill_rank=np.array(draw(st.permutations([*range(n // 2), *[UNORDERED] * (n - n // 2)])), np.int32),
        scored=np.array(draw(st.lists(st.integers(0, 257), min_size=n, max_size=n)), np.int32),
    )


budgets = st.builds(
    Budget, st.integers(1, 60), st.integers(0, 60), st.integers(1, 30), st.integers(1, 4), st.integers(0, 2)
)


@pytest.mark.deep
@settings(deadline=None, max_examples=300)
@given(views(), budgets, st.integers(1, 8))
def test_every_batch_keeps_every_bound(slots: SlotView, budget: Budget, max_num_seqs: int) -> None:
    choice = schedule_step(slots, budget, max_num_seqs)
    chosen, count, decodes = choice.slot, choice.count, choice.decodes
    assert len(set(chosen.tolist())) == len(chosen) == len(count)
    assert slots.runnable[chosen].all() and (count >= 1).all()
    most = np.minimum(slots.ceiling, slots.bound)
    assert (slots.computed[chosen] + count <= most[chosen]).all()
    assert count.sum() <= budget.tokens_per_step
    assert decodes <= max_num_seqs and (count[:decodes] == 1).all()
    assert (slots.computed[chosen[:decodes]] >= slots.prefill_len[chosen[:decodes]]).all()
    chunk_slots, chunks = chosen[decodes:], count[decodes:]
    end = slots.computed[chunk_slots] + chunks
    assert (end <= slots.prefill_len[chunk_slots]).all() and (chunks <= budget.chunk_cap).all()
    assert np.count_nonzero(end < slots.prefill_len[chunk_slots]) <= budget.partial_prefills
    if decodes:
        assert chunks.sum() <= budget.prefill_tokens_beside_decoders
    able = slots.runnable & (slots.computed < most)
    waiting = np.setdiff1d(np.flatnonzero(able & (slots.computed >= slots.prefill_len)), chosen)
    if len(waiting):  # only the bounds keep a decodable slot out, and never one with a lower key
        assert decodes == min(max_num_seqs, budget.tokens_per_step)
        assert slots.order_key[waiting].min() >= slots.order_key[chosen[:decodes]].max()
    assert len(chosen) or not able.any()  # whoever is able is not left with an idle device


@settings(deadline=None, max_examples=100)
@given(views(), budgets, st.integers(1, 8), st.integers(0, 11))
def test_a_slot_that_cannot_run_changes_nothing_for_the_others(
    slots: SlotView, budget: Budget, max_num_seqs: int, victim: int
) -> None:
    victim %= len(slots.computed)
    slots.runnable[victim] = False
    before = pairs(schedule_step(slots, budget, max_num_seqs))
    slots.runnable[victim] = True
    slots.ceiling[victim] = slots.computed[victim]
    assert pairs(schedule_step(slots, budget, max_num_seqs)) == before
