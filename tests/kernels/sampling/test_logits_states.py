"""How much of the device's memory sheets take: what they count, how they grow, who makes room and who gets none."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from quire_common.logit_controls import LogitControls
from quire_common.sequence import Sampling, Sequence, Stop
from quire_worker.cuda.logits_states import LogitsStates
from quire_worker.engine.step_runner import failed_samples
from quire_worker.ops.triton.sampling import sample_rows
from quire_worker.sampling import state_layout
from quire_worker.sampling.logits_state import LogitsState
from quire_worker.sampling.sampler import sample
from tests.kernels.sampling.control_rows import DEVICE, SLOTS, VOCAB, Rows
from tests.kernels.sampling.sampling_rig import make, on_device

# The interpreter computes with numpy, which tells of -inf - -inf and the like.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")


def test_a_state_counts_no_further_than_it_has_room() -> None:
    """A sequence that was given too few output tokens harms nobody's memory."""
    rows = Rows([LogitControls(presence_penalty=1.0)], 3, max_tokens=1)
    (held,) = rows.rows.values()
    room = int(state_layout.packed_state(held.sequence, VOCAB)[state_layout.AT.capacity])
    logits = torch.zeros(1, VOCAB)
    rows.changed(logits, fed=False)
    for token in range(100, 110):
        rows.last[int(rows.slot[0])] = token
        _, changed = rows.changed(logits, fed=True)
    assert int((changed[0] < 0).sum()) <= room
    (kept,) = rows.states._held.values()
    state = kept.words
    assert (
        int(state[state_layout.AT.known]) == room
        and int(state[state_layout.AT.written]) == len(held.sequence.output_ids) + 10
    )


def test_a_state_grows_with_the_tokens_that_it_counts() -> None:
    """From room for one new token on, at several sizes: what it knows is what the CPU knows."""
    rows = Rows([LogitControls(presence_penalty=1.0, repetition_penalty=1.5, bad_words=((3, 4),))] * 3, 5)
    rows.states = LogitsStates(DEVICE, VOCAB, room=1)
    logits = torch.from_numpy(rows.rng.normal(0, 3, (3, VOCAB)).astype(np.float32))
    sizes = set()
    for step in range(14):
        if step:
            rows.feed(rows.rng.integers(0, VOCAB, 3))
        _, changed = rows.changed(logits, fed=step > 0)
        sizes.add(rows.states.num_bytes)
        for row, controls in rows.rows.items():
            wanted = logits[row].numpy().copy()
            controls.apply(wanted)
            np.testing.assert_allclose(changed[row].cpu().numpy(), wanted, rtol=1e-6, atol=1e-6)
    assert len(sizes) > 2 and rows.states.num_bytes == sum(each.words.nbytes for each in rows.states._held.values())


def a_state_of(slot: int, rows: Rows) -> LogitsState:
    ids = np.arange(50, dtype=np.int32)
    rows.slot = np.array([slot], np.int32)
    rows.rows = {0: LogitsState(Sequence(ids, Stop(9), Sampling(controls=LogitControls(presence_penalty=1.0))))}
    return rows.rows[0]


def test_sequences_that_have_ended_make_room_and_nothing_else_does() -> None:
    rows = Rows([None], 1)
    before = [a_state_of(slot, rows) for slot in range(1)]
    rows.addresses(False)
    rows.states = LogitsStates(DEVICE, VOCAB, most_bytes=3 * rows.states.num_bytes)
    for slot in range(3):
        before.append(a_state_of(slot, rows))
        rows.addresses(False)
    full = rows.states.num_bytes
    refused = a_state_of(3, rows)
    _, changed = rows.changed(torch.zeros(1, VOCAB), False)
    assert refused.failure is not None and refused.failure.code == "TOO_MANY_CONTROLS"
    assert bool((changed == float("-inf")).all()) and rows.states.num_bytes == full
    assert not any(each.failure for each in before)
    before[2].ended = True
    admitted = a_state_of(3, rows)
    _, changed = rows.changed(torch.zeros(1, VOCAB), False)
    assert admitted.failure is None and bool(changed.isfinite().all()) and rows.states.num_bytes == full


def test_a_row_for_which_there_is_no_room_fails_alone() -> None:
    rows = Rows([LogitControls(presence_penalty=1.0), None], 1)
    rows.states = LogitsStates(DEVICE, VOCAB, most_bytes=64)
    logits, columns = make(2, 4)
    token, finish = (torch.full((2,), 99, dtype=torch.int32, device=DEVICE) for _ in range(2))
    last = torch.zeros(SLOTS, dtype=torch.int32, device=DEVICE)
    for fed in (False, True):
        changed = rows.changed(logits, fed)
        sample_rows(
            logits.to(DEVICE), on_device(columns), last, token, finish, filtered=True, pdl=False, changed=changed
        )
        failed = failed_samples(rows.batch(fed), token.cpu().numpy())
        assert [(row, each.code) for row, each in failed.items()] == [(0, "TOO_MANY_CONTROLS")]
        assert int(token[1]) == sample(logits, columns)[1]
    assert rows.states.num_bytes == 0


def test_a_slot_with_another_sequence_has_another_state() -> None:
    rows = Rows([LogitControls(presence_penalty=2.0)], 3)
    address = int(rows.addresses(False)[0])
    assert int(rows.addresses(True)[0]) == address, "the same sequence keeps its sheet"
    rows.rows = {0: LogitsState(Sequence(np.array([1], np.int32), Stop(5), Sampling(controls=LogitControls(1.0))))}
    assert int(rows.addresses(False)[0]) != address
    assert rows.states.num_bytes == 4 * len(state_layout.packed_state(rows.rows[0].sequence, VOCAB))
    rows.states.clear()
    assert rows.states.num_bytes == 0
