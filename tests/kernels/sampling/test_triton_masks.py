"""Rows with grammars on the device: they draw what the reference draws, and a row without its mask is held."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from collections.abc import Sequence as Listed
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire_common.credit import Finish
from quire_common.errors import ConfigError
from quire_common.logit_controls import LogitControls
from quire_common.sequence import Sampling, Sequence, Stop
from quire_common.thinking import ThinkingBudget
from quire_worker.cuda.host_rows import HostRows
from quire_worker.cuda.masks import ring_mapping
from quire_worker.cuda.repetition_watch import RepetitionWatch
from quire_worker.matcher.mask_ring import ENTRIES_AT, MaskRing
from quire_worker.ops.triton import masks as mask_launchers
from quire_worker.ops.triton.controls import ControlColumns, change_logits
from quire_worker.ops.triton.kernels import mask as mask_kernels
from quire_worker.ops.triton.kv_splits import BEGIN, COLUMNS, END, SEQUENCE
from quire_worker.sampling.columns import SamplingColumns
from quire_worker.sampling.logits_state import LogitsState
from quire_worker.sampling.sampler import sample
from quire_worker.sampling.token_mask import MaskKind, TokenMask, mask_bytes
from quire_worker.step import HELD, NOTHING_LEFT
from tests.fakes.worker.some_processors import PROCESSORS
from tests.kernels.sampling.control_rows import Rows, some_controls
from tests.kernels.sampling.mask_rows import EOS, GENERATION, LAST_TOKEN, MaskedRows, make_mask
from tests.kernels.sampling.sampling_rig import DEVICE, ON_GPU, VOCAB, make, without_limits
from tests.tiers import deep_after

# The interpreter computes with numpy, which tells of -inf - -inf and the like.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")


@pytest.fixture(params=[1, 2])
def blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Programs that read one row of VOCAB tokens: one, or two."""
    count = int(request.param)
    monkeypatch.setattr(mask_launchers, "_WORDS", mask_bytes(VOCAB) // 4 // count)
    return count


def some_masks(rng: np.random.Generator, vocab: int) -> list[TokenMask | None]:
    """No grammar, one token, a few, nearly all, only the end; the last tokens pad the vocabulary."""
    named = vocab - vocab // 16
    few = rng.choice(named, min(9, named), replace=False).tolist()
    most = np.flatnonzero(rng.random(named) < 0.9).tolist()
    return [None, make_mask(vocab, int(rng.integers(3, named))), make_mask(vocab, *few, 3), make_mask(vocab, *most),
            make_mask(vocab, *EOS), None, make_mask(vocab, named - 1, 3)]  # fmt: skip  # one row each


def masked(vocab: int, masks: Listed[TokenMask | None], **columns: list[int]) -> MaskedRows:
    rows = MaskedRows(vocab, [-1 if mask is None else row for row, mask in enumerate(masks)], **columns)
    for row, mask in enumerate(masks):
        if mask is not None:
            rows.put(row, mask)
    return rows


def of_masks(columns: SamplingColumns, rows: MaskedRows, masks: list[TokenMask | None]) -> SamplingColumns:
    columns.masks = {row: mask for row, mask in enumerate(masks) if mask is not None}
    columns.position = rows.position.astype(np.int64) + 1
    return columns


@pytest.mark.parametrize("filtered", [True, False])
@pytest.mark.parametrize(("vocab", "seed"), deep_after(2, [(1500, 1), (33, 2), (1500, 3), (31, 4), (32, 5), (97, 6)]))
def test_rows_draw_what_the_reference_draws(vocab: int, seed: int, filtered: bool, blocks: int) -> None:
    masks = some_masks(np.random.default_rng(seed), vocab)
    logits, columns = make(len(masks), seed)
    logits = logits[:, :vocab].contiguous()
    if not filtered:
        without_limits(columns)
    rows = masked(vocab, masks)
    wanted = sample(logits, of_masks(columns, rows, masks)).tolist()
    token, finish = rows.draw(logits, columns, rows.fetch(), filtered=filtered)
    assert token == wanted and finish == [0] * len(masks)
    assert all(mask is None or mask.allows(each) for mask, each in zip(masks, token, strict=True))
    assert rows.held == [0] * len(masks) and rows.last_token[: len(masks)].tolist() == token
    assert rows.position.tolist() == [41 + row for row in range(len(masks))]


@pytest.mark.parametrize("seed", deep_after(1, range(5)))
def test_masks_go_with_controls_and_blocked_ids(seed: int, blocks: int) -> None:
    rng = np.random.default_rng(seed)
    masks = some_masks(rng, VOCAB)
    logits, columns = make(len(masks), 60 + seed)
    controlled = Rows([None, *(some_controls(rng) for _ in masks[1:])], seed)
    rows = masked(VOCAB, masks)
    rows.min_len = [1000, 0, 1000, 1000, 1000, 0, 1000]
    rows.stop_id = [[3, 5], [-1, -1], [3, -1], [4, 3], [*EOS], [7, -1], [9, 3]]
    rows.blocked = [1, 0, 1, 1, 1, 0, 1]
    controlled.feed(np.full(len(masks), LAST_TOKEN))
    columns.controls = controlled.rows
    columns.blocked = {
        row: np.array([each for each in ids if each >= 0], np.int32)
        for row, ids in enumerate(rows.stop_id)
        if rows.blocked[row]
    }
    wanted = sample(logits, of_masks(columns, rows, masks)).tolist()
    found = rows.fetch()
    address = controlled.addresses(fed=True)
    changed = change_logits(logits.to(DEVICE), _control_columns(rows, address), rows.last_token, found.allowed)
    token, _ = rows.draw(logits, columns, found, changed=(address, changed))
    assert token == wanted
    assert token[4] in (*EOS, NOTHING_LEFT), "only the end is left, before min_tokens"


def _control_columns(rows: MaskedRows, address: torch.Tensor) -> ControlColumns:
    views = rows.views
    return ControlColumns(
        address=address,
        first_row=views["first_row"],
        fed=views["fed"],
        slot=views["slot"],
        blocked=views["blocked"],
        stop_id=torch.tensor(rows.stop_id, dtype=torch.int32, device=DEVICE),
    )


def test_blocked_ids_may_be_drawn_where_nothing_else_is_left() -> None:
    masks = [make_mask(VOCAB, *EOS), make_mask(VOCAB, 1), make_mask(VOCAB, 1, 2, 300)]
    logits, columns = make(3, 8)
    without_limits(columns)
    rows = masked(VOCAB, masks)
    rows.min_len, rows.stop_id = [50, 50, 50], [[*EOS] for _ in masks]
    token, finish = rows.draw(logits, columns, rows.fetch())
    assert token[0] in EOS and token[1:] == [1, 300] and finish == [Finish.STOP, Finish.STOP, 0]


def missing(rows: MaskedRows) -> dict[int, str]:
    """Rows whose masks are not there, each for a reason of its own."""
    mask = make_mask(VOCAB, 5, 6)
    rows.put(0, mask, late=2)
    rows.put(1, mask, generation=GENERATION + 1)
    rows.put(2, mask)
    index, _ = rows.ring._entry_of(rows.mask_slots[2], int(rows.position[2]) + 1)
    rows.ring._stamps[index] = 0
    rows.put(5, mask)
    return {0: "of another position", 1: "of another sequence", 2: "half written", 3: "none", 4: "no mask slot"}


def test_row_without_its_mask_is_held() -> None:
    rows = MaskedRows(VOCAB, [0, 1, 2, 3, -2, 5, -1])
    logits, columns = make(7, 5)
    reasons = missing(rows)
    columns.masks = {5: make_mask(VOCAB, 5, 6)}
    rows.bound = [1] * 7
    columns.position = rows.position.astype(np.int64) + 1
    wanted = sample(logits, columns).tolist()
    before = rows.position.copy()
    token, finish = rows.draw(logits, columns, rows.fetch())
    assert token == [HELD] * 5 + wanted[5:], reasons
    assert finish == [0] * 5 + [Finish.LENGTH] * 2
    assert rows.last_token[:7].tolist() == [LAST_TOKEN] * 5 + wanted[5:], "held rows feed the same token again"
    assert rows.position.tolist() == [*before[:5], *(before[5:] + 1)] and rows.held == [1] * 5 + [0] * 2


def test_held_row_draws_what_it_would_have_drawn() -> None:
    """The host has packed positions of which it knows no better."""
    mask, free = make_mask(VOCAB, *range(5, 900)), None
    masks: list[TokenMask | None] = [mask, mask, free]
    logits, columns = make(3, 9)
    rows = MaskedRows(VOCAB, [0, 1, -1])
    rows.put(0, mask)
    of_masks(columns, rows, masks)
    wanted = sample(logits, columns).tolist()
    first, _ = rows.draw(logits, columns, rows.fetch())
    assert first == [wanted[0], HELD, wanted[2]]
    rows.put(0, mask)
    rows.put(1, mask)
    of_masks(columns, rows, masks)
    wanted_next = sample(logits, columns).tolist()
    again, _ = rows.draw(logits, columns, rows.fetch(ahead=1))
    assert again == wanted_next and again[1] == wanted[1] and rows.held == [0, 0, 0]


def test_rows_stand_where_the_device_has_them() -> None:
    """Positions, keys, the end by length and min_tokens: all but those of rows without a grammar."""
    rows = MaskedRows(VOCAB, [0, 1, 2, -1], [40, 70, 99, 40])
    rows.bound, rows.min_len = [42, 71, 100, 41], [42, 50, 100, 0]
    rows.stop_id = [[3, -1] for _ in range(4)]
    rows.fetch(ahead=2)
    views = {name: view.tolist() for name, view in rows.views.items()}
    assert views["position"] == views["row_position"] == [40, 70, 99, 40]
    assert views["sample_position"] == [41, 71, 100, 41]
    assert views["last"] == [0, 1, 1, 1] and views["blocked"] == [1, 0, 0, 0]
    splits = rows.splits.cpu().numpy().reshape(COLUMNS, -1)
    for row in range(4):
        mine = splits[SEQUENCE] == row
        keys = np.zeros(200, np.int32)
        for begin, end in zip(splits[BEGIN][mine], splits[END][mine], strict=True):
            keys[begin:end] += 1
        assert keys.tolist() == [1] * (int(rows.position[row]) + 1) + [0] * (199 - int(rows.position[row])), row


def test_damage_shows_where_the_grammar_forbids_the_token() -> None:
    mask = make_mask(VOCAB, 5, 6)
    masks: list[TokenMask | None] = [mask, mask, mask, make_mask(VOCAB, 5)]
    for filtered in (True, False):
        logits, columns = make(4, 3)
        if not filtered:
            without_limits(columns)
        logits[0, 900], logits[1, 901], logits[3, 7] = float("nan"), float("inf"), float("nan")
        rows = masked(VOCAB, masks)
        wanted = sample(logits, of_masks(columns, rows, masks)).tolist()
        assert wanted[:2] == [-1, -1] and wanted[2] >= 0 and wanted[3] == -1
        assert rows.draw(logits, columns, rows.fetch(), filtered=filtered)[0] == wanted


def test_row_of_which_no_token_is_left_says_so() -> None:
    nothing = TokenMask(MaskKind.BITS, 0, bytes(mask_bytes(VOCAB)))
    masks: list[TokenMask | None] = [nothing, make_mask(VOCAB, 5, 6), None]
    logits, columns = make(3, 4)
    logits[1, [5, 6]] = float("-inf")
    rows = masked(VOCAB, masks)
    wanted = sample(logits, of_masks(columns, rows, masks)).tolist()
    assert wanted[:2] == [NOTHING_LEFT, NOTHING_LEFT]
    assert rows.draw(logits, columns, rows.fetch())[0] == wanted


def test_held_row_counts_its_token_once() -> None:
    """In the device's state of penalties, in the host's, and in that of repetitions."""
    rows = MaskedRows(VOCAB, [0, 1])
    sequences = [
        Sequence(np.array([9, 9], np.int32), Stop(40), Sampling(controls=LogitControls(frequency_penalty=0.5))),
        Sequence(np.array([9, 9], np.int32), Stop(40), Sampling(processors=("contrary",))),
    ]
    states = {row: LogitsState(sequence, PROCESSORS) for row, sequence in enumerate(sequences)}
    told = {row: LogitsState(sequence, PROCESSORS) for row, sequence in enumerate(sequences)}
    controlled = Rows([None, None], 1)
    controlled.slot, controlled.rows = np.arange(2, dtype=np.int32), told
    host, watch = HostRows(PROCESSORS), RepetitionWatch()
    mask = make_mask(VOCAB, *range(5, 1200))
    logits, columns = make(2, 9)
    without_limits(columns)
    logits[:, 700] = logits.max() + 0.4
    columns.controls = states
    for step, comes in enumerate([True, False, False, True, True]):
        if comes:
            for row in (0, 1):
                rows.put(row, mask)
        wanted = sample(logits, of_masks(columns, rows, [mask, mask])).tolist()
        found = rows.fetch(ahead=step % 2)
        address = controlled.addresses(fed=step > 0)
        if step == 0:
            rows.views["fed"].zero_()
        changed = change_logits(logits.to(DEVICE), _control_columns(rows, address), rows.last_token, found.allowed)
        batch = controlled.batch(fed=step > 0)
        batch.stop_id = np.full((2, 1), -1, np.int32)
        batch.constraints = {0: None, 1: None}  # type: ignore[dict-item]  # only whose they are counts
        edited = host.edit(
            batch, np.arange(2, dtype=np.int32), logits.to(DEVICE), rows.last_token, (address, changed), found
        )
        token, finish = rows.draw(logits, columns, found, changed=edited)
        assert token == (wanted if comes else [HELD, HELD])
        watch.end(batch, np.array(token), np.array(finish, np.uint8))
        if comes:
            for row, each in enumerate(wanted):
                states[row].fed(each)


@pytest.mark.parametrize("allows", [True, False])
def test_budget_of_thinking_forces_no_token_that_the_grammar_forbids(allows: bool) -> None:
    thinking = ThinkingBudget((4,), (8, 9), 0)
    sequence = Sequence(np.array([4], np.int32), Stop(40), Sampling(), thinking=thinking)
    controlled = Rows([None], 1)
    controlled.slot, controlled.rows = np.zeros(1, np.int32), {0: LogitsState(sequence)}
    mask = make_mask(VOCAB, 8, 20, 21) if allows else make_mask(VOCAB, 20, 21)
    rows = masked(VOCAB, [mask])
    logits, columns = make(1, 2)
    columns.controls = controlled.rows
    wanted = sample(logits, of_masks(columns, rows, [mask])).tolist()
    found, address = rows.fetch(), controlled.addresses(fed=False)
    rows.views["fed"].zero_()
    changed = change_logits(logits.to(DEVICE), _control_columns(rows, address), rows.last_token, found.allowed)
    assert rows.draw(logits, columns, found, changed=(address, changed))[0] == wanted
    assert (wanted == [8]) == allows


@pytest.mark.skipif(ON_GPU, reason="a GPU's loads cannot be interrupted")
@pytest.mark.parametrize("reads", ["the mask before", "the next one"])
def test_mask_that_changes_while_it_is_read_is_not_taken(
    reads: str, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer's three stores of the next mask in the same place, at any moments between the reader's loads."""
    rows = MaskedRows(VOCAB, [0], [40])
    before, after = make_mask(VOCAB, *range(0, VOCAB, 7)), make_mask(VOCAB, *range(3, VOCAB, 7))
    rows.put(0, before)
    wanted, taken = before, 0
    scratch = MaskRing.create(rows.ring.mask_slots, rows.ring.entries_per_slot, VOCAB)
    scratch.put(0, GENERATION, 41, before)
    scratch.put(0, GENERATION, 43, after)
    if reads == "the next one":
        rows.set_position(0, 42)
        wanted = after
    (index, begin), size = rows.ring._entry_of(0, 41), rows.ring.entry_bytes
    memory = rows.ring.memory[begin : begin + size]
    old = memory.copy()
    new = scratch.memory[begin : begin + size]
    stores = [
        lambda: rows.ring._stamps.__setitem__(index, 0),
        lambda: memory[8:].__setitem__(slice(None), new[8:]),
        lambda: rows.ring._stamps.__setitem__(index, scratch._stamps[index]),
    ]
    loads = _VolatileLoads(monkeypatch)
    most = 7 * blocks
    tried = list(itertools.combinations_with_replacement(range(most + 1), 3))
    for moments in (*tried[: -1 : blocks**2], tried[-1]):
        memory[:] = old
        loads.begin(
            {at: [store for each, store in zip(moments, stores, strict=True) if each == at] for at in range(most + 1)}
        )
        found = rows.fetch()
        if found.kind.tolist() == [mask_kernels.HAS_MASK.value]:
            taken += 1
            assert found.allowed[0].numpy().tobytes() == wanted.bits, moments
        assert not found.arrived.any()
    assert 1 <= taken < len(tried) and loads.most >= 7


class _VolatileLoads:
    """From here on, what is to be done before each volatile load of a kernel."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from triton.runtime.interpreter import InterpreterBuilder

        self._work: dict[int, list[Callable[[], None]]] = {}
        self._loads = self.most = 0
        # Loads without a mask come here too.
        load = InterpreterBuilder.create_masked_load
        monkeypatch.setattr(InterpreterBuilder, load.__name__, self._interrupted(load))

    def begin(self, work: dict[int, list[Callable[[], None]]]) -> None:
        """Set what is to be done before the loads of one launch, by the number of the load."""
        self._work, self._loads = work, 0

    def _interrupted(self, load: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(builder: Any, *arguments: Any) -> Any:
            if arguments[-1]:  # volatile
                for each in self._work.get(self._loads, []):
                    each()
                self._loads += 1
                self.most = max(self.most, self._loads)
            return load(builder, *arguments)

        return wrapped


@pytest.mark.skipif(not ON_GPU, reason="the interpreter's loads are one at a time")
def test_masks_that_are_left_beside_a_reader_are_whole() -> None:
    """Another thread leaves one mask after the other in the place that is read."""
    rows = MaskedRows(VOCAB, [0], [40])
    whole = [make_mask(VOCAB, *range(first, VOCAB, 7)) for first in range(7)]
    at, ended, kinds = 41, threading.Event(), list[int]()

    def write() -> None:
        nonlocal at
        while not ended.is_set():
            rows.ring.put(0, GENERATION, at, whole[at % 7])
            at += rows.ring.entries_per_slot

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(200):
            rows.set_position(0, at + int(rows.position[0]) % 5 * rows.ring.entries_per_slot - 1)
            found = rows.fetch()
            kinds += found.kind.tolist()
            if kinds[-1] == mask_kernels.HAS_MASK.value:
                assert found.allowed[0].cpu().numpy().tobytes() == whole[(int(rows.position[0]) + 1) % 7].bits
    finally:
        ended.set()
        writer.join()
    assert mask_kernels.HELD.value in kinds


def test_ring_that_cannot_be_mapped_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Driver:
        """Stands for CUDA's runtime."""

        def cudaHostRegister(self, address: int, size: int, flags: int) -> int:
            assert address % 4096 == 0 and size > ENTRIES_AT and flags == 2
            return 1

    monkeypatch.setattr(torch.cuda, "cudart", Driver)
    with pytest.raises(ConfigError) as caught:
        ring_mapping.RingMapping(MaskRing.create(2, 2, VOCAB), torch.device("cuda"))
    assert caught.value.code == "MASKS_NOT_MAPPED" and "--max-constrained-seqs 0" in caught.value.fix


def test_kernel_knows_the_places_of_the_ring(tmp_path: Path) -> None:
    """Many mask slots and positions: each row reads its own entry."""
    mask_slots = [15, 3, 0, 8, 2, 7]
    rows = MaskedRows(VOCAB, mask_slots, [90, 91, 4, 5, 1000, 77])
    masks: list[TokenMask | None] = [make_mask(VOCAB, 100 + row, 1400 - row) for row in range(6)]
    for mask_slot in range(16):
        for at in range(2):
            rows.ring.put(mask_slot, GENERATION + 1, at, make_mask(VOCAB, 3))
    for row, mask in enumerate(masks):
        assert mask is not None
        rows.put(row, mask)
    logits, columns = make(6, 12)
    wanted = sample(logits, of_masks(columns, rows, masks)).tolist()
    assert rows.draw(logits, columns, rows.fetch())[0] == wanted
