"""Controls on the device against the CPU's: what becomes of logits, what is drawn, and what a sheet remembers."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from quire_common.credit import Finish
from quire_common.logit_controls import LogitControls
from quire_common.repetition import RepetitionDetection
from quire_common.sequence import Sampling, Sequence, Stop
from quire_common.thinking import ThinkingBudget
from quire_worker.cuda.device_scores import start_scores
from quire_worker.cuda.host_rows import HostRows
from quire_worker.cuda.logits_states import LogitsStates
from quire_worker.cuda.repetition_watch import RepetitionWatch
from quire_worker.engine.step_runner import failed_samples
from quire_worker.ops.triton.sampling import sample_rows
from quire_worker.sampling.logits_state import LogitsState
from quire_worker.sampling.logprobs import logprob_columns
from quire_worker.sampling.sampler import sample
from quire_worker.step import NOTHING_LEFT, PromptScores
from tests.fakes.worker.some_processors import PROCESSORS
from tests.kernels.sampling.control_rows import ALPHABET, DEVICE, ON_GPU, SLOTS, VOCAB, Rows, some_controls
from tests.kernels.sampling.sampling_rig import make, on_device, without_limits
from tests.tiers import deep_after

# The interpreter computes with numpy, which tells of -inf - -inf and the like.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")


@pytest.mark.parametrize("seed", range(20 if ON_GPU else 6))
def test_logits_become_what_the_cpu_makes_of_them(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = Rows([None if row == 2 else some_controls(rng) for row in range(5)], seed)
    rows.blocked[:] = [0, 1, 1, 0, 1]
    rows.stop_id[:] = [[3, -1], [4, 7], [5, -1], [-1, -1], [-1, 900]]
    logits = torch.from_numpy(rng.normal(0, 3, (5, VOCAB)).astype(np.float32))
    for step in range(6):
        if step:
            rows.feed(rng.integers(0, ALPHABET, 5))
        _, changed = rows.changed(logits, fed=step > 0)
        for row, controls in rows.rows.items():
            wanted = logits[row].numpy().copy()
            ids = rows.stop_id[row]
            controls.apply(wanted, ids[ids >= 0] if rows.blocked[row] else None)
            np.testing.assert_allclose(changed[row].cpu().numpy(), wanted, rtol=1e-6, atol=1e-6)


def test_a_thinking_budget_is_kept_as_on_the_cpu() -> None:
    """Over many tokens, of marks of one to four tokens that overlap, on a sheet that began with some of them."""
    rng = np.random.default_rng(4)
    rows, forced = Rows([None] * SLOTS, 9), 0
    for row in range(SLOTS):
        start, end = (tuple(rng.integers(0, 3, rng.integers(1, 5)).tolist()) for _ in range(2))
        ids = [rng.integers(0, 3, n).astype(np.int32) for n in (8, int(rng.integers(0, 4)))]
        budget = ThinkingBudget(start, end, int(rng.integers(0, 4)))
        rows.rows[row] = LogitsState(Sequence(ids[0], Stop(60), Sampling(), ids[1], thinking=budget))
    logits = torch.from_numpy(rng.normal(0, 3, (SLOTS, 7)).astype(np.float32))
    rows.states = LogitsStates(DEVICE, 7)
    for step in range(60 if ON_GPU else 25):
        _, changed = rows.changed(logits, fed=step > 0)
        drawn = rng.integers(0, 3, SLOTS)
        for row, controls in rows.rows.items():
            wanted = logits[row].numpy().copy()
            controls.apply(wanted)
            assert changed[row].cpu().tolist() == wanted.tolist()
            if np.isinf(wanted).any():
                forced, drawn[row] = forced + 1, wanted.argmax()
        rows.feed(drawn)
    assert forced > 20


@pytest.mark.parametrize("seed", range(8) if ON_GPU else deep_after(1, range(2)))
def test_what_is_drawn_is_what_the_reference_draws(seed: int) -> None:
    logits, columns = make(6, 40 + seed)
    rng = np.random.default_rng(seed)
    rows = Rows([None, *(some_controls(rng) for _ in range(3)), None, some_controls(rng)], seed)
    free = sample(logits, columns)
    columns.controls = rows.rows
    columns.blocked = {row: np.array([free[row]], np.int32) for row in (0, 1, 3)}
    rows.blocked[[0, 1, 3]] = 1
    rows.stop_id[:, 0] = free
    device = on_device(columns, blocked=rows.blocked.tolist(), stop_id=rows.stop_id.tolist())
    raw = logits.to(DEVICE)
    for step in range(3):
        wanted = sample(logits, columns)
        changed = rows.changed(logits, fed=step > 0)
        token, finish = (torch.full((6,), 99, dtype=torch.int32, device=DEVICE) for _ in range(2))
        fed = torch.zeros(SLOTS, dtype=torch.int32, device=DEVICE)
        sample_rows(raw, device, fed, token, finish, filtered=True, pdl=False, changed=changed)
        assert token.tolist() == wanted.tolist()
        rows.feed(wanted)
    assert torch.equal(raw.cpu(), logits), "logits stay raw, for logprobs"


def test_nothing_left_and_damaged_rows_are_told_apart() -> None:
    forbid_all = LogitControls(allowed_token_ids=(5,), bad_words=((5,),))
    rows = Rows([forbid_all, forbid_all, LogitControls(presence_penalty=1.0), None], 1)
    logits, columns = make(4, 2)
    logits[1, 1400] = float("nan")
    logits[3, 3] = float("nan")
    columns.controls = rows.rows
    token, finish = (torch.full((4,), 99, dtype=torch.int32, device=DEVICE) for _ in range(2))
    last = torch.zeros(SLOTS, dtype=torch.int32, device=DEVICE)
    device = on_device(columns)
    sample_rows(
        logits.to(DEVICE), device, last, token, finish, filtered=True, pdl=False, changed=rows.changed(logits, False)
    )
    wanted = sample(logits, columns).tolist()
    assert token.tolist() == wanted and wanted[:2] == [NOTHING_LEFT, -1] and wanted[2] >= 0 and wanted[3] == -1


@pytest.mark.deep
@pytest.mark.parametrize("seed", range(4 if ON_GPU else 2))
def test_rows_that_python_changes_are_drawn_as_on_the_cpu(seed: int) -> None:
    """Beside rows with sheets and rows without anything; one's processor fails at its fourth token."""
    logits, columns = make(6, 60 + seed)
    rng = np.random.default_rng(seed)
    rows = Rows([None, some_controls(rng), None, some_controls(rng), None, some_controls(rng)], seed)
    for row, name, controls in ((2, "contrary", None), (3, "contrary", some_controls(rng)), (4, "weary", None)):
        ids = rng.integers(0, ALPHABET, 9).astype(np.int32)
        sequence = Sequence(ids, Stop(40), Sampling(controls=controls, processors=(name,)))
        rows.rows[row] = LogitsState(sequence, PROCESSORS)
    # The engine's, which are told of nothing before the results are there.
    told = {row: LogitsState(controls.sequence, PROCESSORS) for row, controls in rows.rows.items()}
    columns.controls = rows.rows
    host, places = HostRows(PROCESSORS), np.arange(6, dtype=np.int32)
    for step in range(5):
        wanted = sample(logits, columns)
        batch = rows.batch(fed=step > 0)
        batch.controls = told
        changed = host.edit(batch, places, logits.to(DEVICE), rows.last, rows.changed(logits, fed=step > 0))
        token, finish = (torch.full((6,), 99, dtype=torch.int32, device=DEVICE) for _ in range(2))
        fed = torch.zeros(SLOTS, dtype=torch.int32, device=DEVICE)
        sample_rows(
            logits.to(DEVICE), on_device(columns), fed, token, finish, filtered=True, pdl=False, changed=changed
        )
        assert token.tolist() == wanted.tolist()
        failed = failed_samples(batch, token.cpu().numpy())
        assert [(row, each.code) for row, each in failed.items()] == [(4, "LOGITS_PROCESSOR_FAILED")] * (step == 3)
        rows.feed(np.maximum(wanted, 0))


def test_rows_that_python_changes_need_no_device_state() -> None:
    rows = Rows([None, None], 1)
    sequence = Sequence(np.array([1, 2], np.int32), Stop(9), Sampling(processors=("contrary",)))
    rows.rows = {1: LogitsState(sequence, PROCESSORS)}
    assert rows.states.addresses(rows.batch(fed=False)) == {}
    logits = torch.zeros(2, 9)
    address, changed = HostRows(PROCESSORS).edit(  # type: ignore[misc]  # it is there, since a row asks
        rows.batch(fed=False), np.arange(2, dtype=np.int32), logits.to(DEVICE), rows.last, None
    )
    assert address.tolist() == [0, 1]
    assert torch.isinf(changed[1]).nonzero().flatten().tolist() == [3, 8]


def test_a_repetition_ends_its_sequence_as_soon_as_it_is_seen() -> None:
    rule = RepetitionDetection(max_pattern_size=2, min_pattern_size=1, min_count=3)
    sequence = Sequence(np.array([1, 2], np.int32), Stop(40, repetition=rule), Sampling())
    rows = Rows([None, None], 1)
    controls = LogitsState.of(sequence)
    assert controls is not None and not controls.changes_logits
    rows.rows = {1: controls}
    watch, ends = RepetitionWatch(), []
    for step, token in enumerate([4, 5, 6, 5, 6, 5, 6, 6]):
        finish = np.zeros(2, np.uint8)
        watch.end(rows.batch(fed=step > 0), np.array([9, token], np.int32), finish)
        assert finish[0] == 0
        ends.append(int(finish[1]))
    assert ends.index(Finish.REPETITION) == 6 and not any(ends[:6])


@pytest.mark.deep
def test_prompt_logprobs_are_those_of_the_reference() -> None:
    rng = np.random.default_rng(3)
    weight = torch.from_numpy(rng.normal(0, 1, (60, 24)).astype(np.float32))
    hidden = torch.from_numpy(rng.normal(0, 1, (200, 24)).astype(np.float32))
    batch = Rows([None, None], 1).batch(fed=False)
    scores = {n: rng.integers(0, 60, size).astype(np.int32) for n, size in ((0, 100), (1, 7))}
    batch.scores = {0: PromptScores(scores[0], 3), 1: PromptScores(scores[1], 0)}
    first = np.array([0, 150], np.int32)
    there = weight.to(DEVICE)
    found = start_scores(hidden.to(DEVICE), lambda rows: rows @ there.T, batch, first)
    if ON_GPU:
        torch.cuda.synchronize()
    for sequence, columns in found.columns().items():
        token, begin = scores[sequence], int(first[sequence])
        raw = hidden[begin : begin + len(token)] @ weight.T
        wanted = logprob_columns(raw, token, np.full(len(token), batch.scores[sequence].wanted, np.int32))
        assert wanted is not None
        np.testing.assert_allclose(columns.logprob, wanted.logprob, atol=1e-4)
        for name in ("token_index", "rank", "top_count", "top_id"):
            assert getattr(columns, name).tolist() == getattr(wanted, name).tolist(), name


@pytest.mark.deep
@pytest.mark.parametrize("filtered", [False, True])
def test_a_logit_that_a_penalty_makes_infinite_is_its_requests_error(filtered: bool) -> None:
    """The second row's infinite tokens are all forbidden, the third is damaged, the fourth thinks no more."""
    tiny = LogitControls(repetition_penalty=1e-37)
    forbidden = LogitControls(repetition_penalty=1e-37, bad_words=tuple((token,) for token in range(ALPHABET)))
    rows = Rows([tiny, forbidden, tiny, tiny, None], 1)
    for row in range(4):
        ids = np.arange(ALPHABET, dtype=np.int32)
        thinking = ThinkingBudget((1, 2), (3, 4), 0) if row == 3 else None
        sequence = Sequence(np.append(ids, [1, 2]).astype(np.int32), Stop(9), Sampling(controls=rows_of(rows, row)))
        rows.rows[row] = LogitsState(dataclasses.replace(sequence, thinking=thinking))
    logits, columns = make(5, 3)
    logits[:, :ALPHABET] = 100.0
    logits[2, 1400] = float("nan")
    columns.controls = rows.rows
    if not filtered:
        without_limits(columns)
    token, finish = (torch.full((5,), 99, dtype=torch.int32, device=DEVICE) for _ in range(2))
    last = torch.zeros(SLOTS, dtype=torch.int32, device=DEVICE)
    changed = rows.changed(logits, False)
    sample_rows(
        logits.to(DEVICE), on_device(columns), last, token, finish, filtered=filtered, pdl=False, changed=changed
    )
    wanted = sample(logits, columns).tolist()
    assert token.tolist() == wanted and wanted[0] == NOTHING_LEFT and wanted[2:4] == [-1, 3]
    assert wanted[1] >= ALPHABET and wanted[4] >= 0
    failed = failed_samples(rows.batch(fed=False), token.cpu().numpy())
    assert [(row, each.code) for row, each in failed.items()] == [(0, "NO_TOKEN_LEFT"), (2, "NAN_LOGITS")]


def rows_of(rows: Rows, row: int) -> LogitControls | None:
    return rows.rows[row].sequence.sampling.controls


def test_a_row_that_python_changes_is_its_requests_error_too_where_a_penalty_makes_it_infinite() -> None:
    rows = Rows([None, None], 1)
    controls = LogitControls(repetition_penalty=1e-37)
    sequence = Sequence(np.array([1, 2], np.int32), Stop(9), Sampling(controls=controls, processors=("contrary",)))
    rows.rows = {1: LogitsState(sequence, PROCESSORS)}
    logits, columns = make(2, 5)
    logits[:, 1:3] = 100.0
    columns.controls = rows.rows
    places, raw = np.arange(2, dtype=np.int32), logits.to(DEVICE)
    changed = HostRows(PROCESSORS).edit(rows.batch(fed=False), places, raw, rows.last, None)
    token, finish = (torch.full((2,), 99, dtype=torch.int32, device=DEVICE) for _ in range(2))
    last = torch.zeros(SLOTS, dtype=torch.int32, device=DEVICE)
    sample_rows(raw, on_device(columns), last, token, finish, filtered=True, pdl=False, changed=changed)
    assert token.tolist()[1] == NOTHING_LEFT == sample(logits, columns)[1]
