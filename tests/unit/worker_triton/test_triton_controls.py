"""Controls on the device against the CPU's: what becomes of logits, what is drawn, and what a sheet remembers."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from torch import Tensor

from quire_common.credit import Finish
from quire_common.logit_controls import LogitControls
from quire_common.repetition import RepetitionDetection
from quire_common.sequence import Sampling, Sequence, Stop
from quire_common.thinking import ThinkingBudget
from quire_worker.cuda.control_sheets import ControlSheets
from quire_worker.cuda.device_scores import start_scores
from quire_worker.cuda.host_rows import HostRows
from quire_worker.cuda.repetition_watch import RepetitionWatch
from quire_worker.engine.step_runner import failed_draws
from quire_worker.ops.triton.controls import ControlColumns, change_logits
from quire_worker.ops.triton.sampling import draw
from quire_worker.sampling import control_sheet as sheets
from quire_worker.sampling.logprobs import logprob_columns
from quire_worker.sampling.row_controls import RowControls
from quire_worker.sampling.sampler import NOTHING_LEFT, sample
from quire_worker.step import PromptScores, StepBatch
from tests.fakes.some_processors import PROCESSORS
from tests.unit.worker_triton.drawing import make, on_device

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
# The interpreter computes with numpy, which tells of -inf - -inf and the like.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")
VOCAB, SLOTS = 1500, 8
ALPHABET = 12
"""Sequences are of few tokens, so that words and counts meet."""


def some_controls(rng: np.random.Generator) -> LogitControls:
    """Each part is asked in about half of the cases."""

    def words(count: int) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(rng.integers(0, ALPHABET, rng.integers(1, 4)).tolist()) for _ in range(count))

    half = (rng.random(6) < 0.5).tolist()
    biased = np.unique(rng.integers(0, 300, 5)).tolist()
    found = LogitControls(
        presence_penalty=0.75 if half[0] else 0.0,
        frequency_penalty=-0.3 if half[1] else 0.0,
        repetition_penalty=1.7 if half[2] else 1.0,
        logit_bias=tuple((token, float(rng.normal(0, 5))) for token in biased) if half[3] else (),
        allowed_token_ids=tuple(range(0, VOCAB, 3)) if half[4] else (),
        bad_words=words(300 if rng.random() < 0.2 else 6) if half[5] else (),
    )
    return found if found != LogitControls() else LogitControls(presence_penalty=1.0)


def some_thinking(rng: np.random.Generator) -> ThinkingBudget | None:
    """Of so few tokens that sequences begin and end to think all the time."""
    start, end = (tuple(rng.integers(0, 3, rng.integers(1, 4)).tolist()) for _ in range(2))
    return ThinkingBudget(start, end, int(rng.integers(0, 5))) if rng.random() < 0.5 else None


class Rows:
    """Sequences in slots, on both sides: `logits` of the CPU's rows are changed by RowControls, the device's by us."""

    def __init__(self, controls: list[LogitControls | None], seed: int, max_tokens: int = 40) -> None:
        self.rng = np.random.default_rng(seed)
        self.slot = self.rng.permutation(SLOTS)[: len(controls)].astype(np.int32)
        self.rows: dict[int, RowControls] = {}
        for row, each in enumerate(controls):
            ids = [self.rng.integers(0, ALPHABET, n).astype(np.int32) for n in (9, int(self.rng.integers(0, 7)))]
            if each is not None:
                thinking = some_thinking(self.rng)
                sequence = Sequence(ids[0], Stop(max_tokens), Sampling(controls=each), ids[1], thinking=thinking)
                self.rows[row] = RowControls(sequence)
        self.sheets = ControlSheets(DEVICE, VOCAB)
        self.last = torch.zeros(SLOTS, dtype=torch.int32, device=DEVICE)
        self.blocked = np.zeros(len(controls), np.int32)
        self.stop_id = np.full((len(controls), 2), -1, np.int32)

    def batch(self, fed: bool) -> StepBatch:
        n = len(self.slot)
        zeros, floats = np.zeros(n, np.int32), np.zeros(n, np.float32)
        return StepBatch(
            np.zeros(n, np.int64), zeros + 1, zeros, zeros[:, None], np.ones(n, np.bool_), floats, zeros, floats + 1,
            floats, np.zeros(n, np.uint64), zeros.astype(np.uint32), zeros - 1, controls=self.rows, slot=self.slot,
            fed=np.full(n, fed), last=np.zeros(n, np.bool_),
        )  # fmt: skip  # mostly neutral columns

    def feed(self, token: np.ndarray) -> None:
        """Tokens that were drawn, by row."""
        for row, controls in self.rows.items():
            controls.fed(int(token[row]))
            self.last[int(self.slot[row])] = int(token[row])

    def addresses(self, fed: bool) -> Tensor:
        found = np.zeros(len(self.slot), np.int64)
        for row, address in self.sheets.addresses(self.batch(fed)).items():
            found[row] = address
        return torch.from_numpy(found).to(DEVICE)

    def changed(self, logits: Tensor, fed: bool) -> tuple[Tensor, Tensor]:
        n = len(self.slot)
        address = self.addresses(fed)
        columns = ControlColumns(
            address=address,
            first_row=torch.arange(n, dtype=torch.int32, device=DEVICE),
            fed=torch.full((n,), int(fed), dtype=torch.int32, device=DEVICE),
            slot=torch.from_numpy(self.slot).to(DEVICE),
            blocked=torch.from_numpy(self.blocked).to(DEVICE),
            stop_id=torch.from_numpy(self.stop_id).to(DEVICE),
        )
        return address, change_logits(logits.to(DEVICE), columns, self.last)


@pytest.mark.parametrize("seed", range(20 if ON_GPU else 6))
def test_logits_become_what_row_controls_make_of_them(seed: int) -> None:
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
        rows.rows[row] = RowControls(Sequence(ids[0], Stop(60), Sampling(), ids[1], thinking=budget))
    logits = torch.from_numpy(rng.normal(0, 3, (SLOTS, 7)).astype(np.float32))
    rows.sheets = ControlSheets(DEVICE, 7)
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


def test_a_sheet_counts_no_further_than_it_has_room() -> None:
    """A sequence that was given too few output tokens harms nobody's memory."""
    rows = Rows([LogitControls(presence_penalty=1.0)], 3, max_tokens=1)
    (held,) = rows.rows.values()
    room = int(sheets.control_sheet(held.sequence, VOCAB)[sheets.CAPACITY])
    logits = torch.zeros(1, VOCAB)
    rows.changed(logits, fed=False)
    for token in range(100, 110):
        rows.last[int(rows.slot[0])] = token
        _, changed = rows.changed(logits, fed=True)
    assert int((changed[0] < 0).sum()) <= room
    ((_, sheet),) = rows.sheets._held.values()
    assert int(sheet[sheets.KNOWN]) == room and int(sheet[sheets.WRITTEN]) == len(held.sequence.output_ids) + 10


def test_a_slot_that_is_anothers_has_another_sheet() -> None:
    rows = Rows([LogitControls(presence_penalty=2.0)], 3)
    address = int(rows.addresses(False)[0])
    assert int(rows.addresses(True)[0]) == address, "the same sequence keeps its sheet"
    rows.rows = {0: RowControls(Sequence(np.array([1], np.int32), Stop(5), Sampling(controls=LogitControls(1.0))))}
    assert int(rows.addresses(False)[0]) != address
    assert rows.sheets.num_bytes == 4 * len(sheets.control_sheet(rows.rows[0].sequence, VOCAB))
    rows.sheets.clear()
    assert rows.sheets.num_bytes == 0


@pytest.mark.parametrize("seed", range(8 if ON_GPU else 2))
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
        draw(raw, device, fed, token, finish, filtered=True, pdl=False, changed=changed)
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
    draw(logits.to(DEVICE), device, last, token, finish, filtered=True, pdl=False, changed=rows.changed(logits, False))
    wanted = sample(logits, columns).tolist()
    assert token.tolist() == wanted and wanted[:2] == [NOTHING_LEFT, -1] and wanted[2] >= 0 and wanted[3] == -1


@pytest.mark.parametrize("seed", range(4 if ON_GPU else 2))
def test_rows_that_python_changes_are_drawn_as_on_the_cpu(seed: int) -> None:
    """Beside rows with sheets and rows without anything; one's processor fails at its fourth token."""
    logits, columns = make(6, 60 + seed)
    rng = np.random.default_rng(seed)
    rows = Rows([None, some_controls(rng), None, some_controls(rng), None, some_controls(rng)], seed)
    for row, name, controls in ((2, "contrary", None), (3, "contrary", some_controls(rng)), (4, "weary", None)):
        ids = rng.integers(0, ALPHABET, 9).astype(np.int32)
        sequence = Sequence(ids, Stop(40), Sampling(controls=controls, processors=(name,)))
        rows.rows[row] = RowControls(sequence, PROCESSORS)
    # The engine's, which are told of nothing before the results are there.
    told = {row: RowControls(controls.sequence, PROCESSORS) for row, controls in rows.rows.items()}
    columns.controls = rows.rows
    host, places = HostRows(PROCESSORS), np.arange(6, dtype=np.int32)
    for step in range(5):
        wanted = sample(logits, columns)
        batch = rows.batch(fed=step > 0)
        batch.controls = told
        changed = host.edit(batch, places, logits.to(DEVICE), rows.last, rows.changed(logits, fed=step > 0))
        token, finish = (torch.full((6,), 99, dtype=torch.int32, device=DEVICE) for _ in range(2))
        fed = torch.zeros(SLOTS, dtype=torch.int32, device=DEVICE)
        draw(logits.to(DEVICE), on_device(columns), fed, token, finish, filtered=True, pdl=False, changed=changed)
        assert token.tolist() == wanted.tolist()
        failed = failed_draws(batch, token.cpu().numpy())
        assert [(row, each.code) for row, each in failed.items()] == [(4, "LOGITS_PROCESSOR_FAILED")] * (step == 3)
        rows.feed(np.maximum(wanted, 0))


def test_rows_that_python_changes_need_no_sheet_beside_them() -> None:
    rows = Rows([None, None], 1)
    sequence = Sequence(np.array([1, 2], np.int32), Stop(9), Sampling(processors=("contrary",)))
    rows.rows = {1: RowControls(sequence, PROCESSORS)}
    assert rows.sheets.addresses(rows.batch(fed=False)) == {}
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
    controls = RowControls.of(sequence)
    assert controls is not None and not controls.changes_logits
    rows.rows = {1: controls}
    watch, ends = RepetitionWatch(), []
    for step, token in enumerate([4, 5, 6, 5, 6, 5, 6, 6]):
        finish = np.zeros(2, np.uint8)
        watch.end(rows.batch(fed=step > 0), np.array([9, token], np.int32), finish)
        assert finish[0] == 0
        ends.append(int(finish[1]))
    assert ends.index(Finish.REPETITION) == 6 and not any(ends[:6])


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
        rows.rows[row] = RowControls(dataclasses.replace(sequence, thinking=thinking))
    logits, columns = make(5, 3)
    logits[:, :ALPHABET] = 100.0
    logits[2, 1400] = float("nan")
    columns.controls = rows.rows
    if not filtered:
        columns.top_k[:], columns.top_p[:], columns.min_p[:] = 0, 1.0, 0.0
    token, finish = (torch.full((5,), 99, dtype=torch.int32, device=DEVICE) for _ in range(2))
    last = torch.zeros(SLOTS, dtype=torch.int32, device=DEVICE)
    changed = rows.changed(logits, False)
    draw(logits.to(DEVICE), on_device(columns), last, token, finish, filtered=filtered, pdl=False, changed=changed)
    wanted = sample(logits, columns).tolist()
    assert token.tolist() == wanted and wanted[0] == NOTHING_LEFT and wanted[2:4] == [-1, 3]
    assert wanted[1] >= ALPHABET and wanted[4] >= 0
    failed = failed_draws(rows.batch(fed=False), token.cpu().numpy())
    assert [(row, each.code) for row, each in failed.items()] == [(0, "NO_TOKEN_LEFT"), (2, "NAN_LOGITS")]


def rows_of(rows: Rows, row: int) -> LogitControls | None:
    return rows.rows[row].sequence.sampling.controls


def test_a_row_that_python_changes_is_its_requests_error_too_where_a_penalty_makes_it_infinite() -> None:
    rows = Rows([None, None], 1)
    controls = LogitControls(repetition_penalty=1e-37)
    sequence = Sequence(np.array([1, 2], np.int32), Stop(9), Sampling(controls=controls, processors=("contrary",)))
    rows.rows = {1: RowControls(sequence, PROCESSORS)}
    logits, columns = make(2, 5)
    logits[:, 1:3] = 100.0
    columns.controls = rows.rows
    places, raw = np.arange(2, dtype=np.int32), logits.to(DEVICE)
    changed = HostRows(PROCESSORS).edit(rows.batch(fed=False), places, raw, rows.last, None)
    token, finish = (torch.full((2,), 99, dtype=torch.int32, device=DEVICE) for _ in range(2))
    last = torch.zeros(SLOTS, dtype=torch.int32, device=DEVICE)
    draw(raw, on_device(columns), last, token, finish, filtered=True, pdl=False, changed=changed)
    assert token.tolist()[1] == NOTHING_LEFT == sample(logits, columns)[1]
