"""The check of whole steps: its batches make a worker choose the very sizes, and what is wrong is told of."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest
import torch

from bench.gpu.record import Recorder
from quire_common.credit import LogprobColumns
from quire_worker.arrays import Float32
from quire_worker.cuda.cuda_device import _size_of
from quire_worker.cuda.step_size import MOST_PADDED_ROWS, StepSize, graph_sizes
from quire_worker.engine.ports import StepOutcome
from quire_worker.matcher.mask_ring import MaskRing
from quire_worker.step import DeviceTiming, StepBatch
from tests.gpu import steps
from tests.gpu.check_model import CheckModel
from tests.gpu.step_batches import StepBatches
from tests.gpu.step_check import StepCheck, error
from tests.gpu.steps import larger_steps, padded_sizes, some
from tests.kernels.steps.stepping import least_that_suits

VOCAB, PAGE, PAGES, SLOTS = 97, 64, 2560, 1280
AGREEING = [np.zeros(SLOTS, np.int64)] * 2


@pytest.mark.parametrize("tokens", [8192, 16384])
def test_a_batch_of_a_size_runs_as_that_size(tokens: int) -> None:
    batches = StepBatches(VOCAB, PAGE, PAGES, SLOTS)
    sizes = graph_sizes(512, tokens)
    chosen = sizes[::3] + [size for size in sizes if size.rows > MOST_PADDED_ROWS]
    for size in chosen:
        asked = _size_of(batches.make(size, AGREEING))
        # A step with controls is drawn by what filters, too.
        assert least_that_suits(sizes, asked) == size, asked
    for size in larger_steps(tokens):
        asked = _size_of(batches.make(size, AGREEING))
        assert asked.rows == size.rows > MOST_PADDED_ROWS and asked.total_rows <= tokens


def test_what_is_checked_by_default() -> None:
    sizes = [size for each in padded_sizes().values() for size in each]
    assert len(sizes) == len(set(sizes)) > 300
    assert {512, 1} <= {size.decodes for size in sizes} and max(size.rows for size in sizes) == MOST_PADDED_ROWS
    assert {(size.filtered, size.controlled) for size in sizes} == {(False, False), (True, False), (True, True)}
    assert some([StepSize(each) for each in range(10)], 4) == [StepSize(each) for each in (0, 3, 6, 9)]


def test_rows_that_decode_have_slots_in_which_devices_agree() -> None:
    drawn = [np.arange(SLOTS), np.arange(SLOTS)]
    drawn[1][::5] += 1
    batch = StepBatches(VOCAB, PAGE, PAGES, SLOTS).make(StepSize(100, 32, 2), drawn)
    slots = batch.slot[batch.fed]
    assert len(slots) >= 99 and len(set(batch.slot.tolist())) == len(batch.slot)
    assert (slots % 5 != 0).all() and (batch.token[: len(slots)] == slots).all()


def outcome(token: list[int], logprob: list[float]) -> StepOutcome:
    count = len(token)
    columns = LogprobColumns(
        np.arange(count, dtype=np.int32),
        np.array(logprob, np.float32),
        np.ones(count, np.int32),
        np.zeros(count, np.int32),
        np.empty(0, np.int32),
        np.empty(0, np.float32),
    )
    return StepOutcome(
        np.array(token, np.int32)[:, None], np.zeros(count, np.uint8), {}, columns, DeviceTiming(0, 0, 0), 0
    )


def test_wrong_tokens_wrong_probabilities_and_nan_are_errors() -> None:
    batch = StepBatches(VOCAB, PAGE, PAGES, SLOTS).make(StepSize(1), AGREEING)
    raw = np.zeros((1, VOCAB), np.float32)
    raw[0, 5] = 10.0
    right = float(10.0 - np.log(np.exp(10.0) + VOCAB - 1))
    assert error(batch, raw, outcome([5], [right])) < 1e-6
    assert error(batch, raw, outcome([5], [right - 1.0])) == pytest.approx(0.1)
    assert error(batch, raw, outcome([6], [right - 10.0])) == pytest.approx(1.0)
    assert error(batch, raw, outcome([5], [float("nan")])) == float("inf")
    assert error(batch, raw, outcome([-1], [right])) == float("inf")


def test_places_that_are_nobodys_are_nan_on_the_device_alone(tmp_path: Path) -> None:
    model = CheckModel(tmp_path, 16)
    batch = StepBatches(model.spec.vocab_size, model.page_size, 16, 8).make(StepSize(2, 8, 1), AGREEING)
    batch = dataclasses.replace(
        batch,
        position=np.array([model.page_size + 4, 3, 0], np.int32),
        page_table=np.array([[7, 2], [3, 0], [4, 5]], np.int32),
    )
    model.fill_reference(batch)
    model.fill_device(batch)
    first, second = batch.page_table[0, :2]
    there, plain = model.pages.cpu().float(), model.runner.pool.tensor
    assert torch.equal(there[first], plain[first]) and not plain[first].eq(0).any()
    assert torch.equal(there[second][..., :4, :], plain[second][..., :4, :])
    assert there[second][..., 4:, :].isnan().all() and plain[second][..., 4:, :].eq(0).all()
    assert there[0].eq(0).all()
    others = sorted(set(range(1, 16)) - set(batch.page_table.ravel().tolist()))
    assert there[others].isnan().all()


class FakeModel:
    """Logits that depend on the sequence's last token alone; a device that draws the best, or says what is wrong."""

    on_gpu, page_size, num_pages = False, PAGE, PAGES
    spec = SimpleNamespace(vocab_size=VOCAB)

    def __init__(self, wrong: str = "") -> None:
        self.wrong = wrong
        self.filled = 0

    def engine_spec(self, max_num_seqs: int, masks: MaskRing) -> SimpleNamespace:
        return SimpleNamespace(num_slots=SLOTS)

    def make_device(self, spec: object, max_tokens: int, *, eager: bool) -> FakeDevice:
        return FakeDevice(self, "" if eager else self.wrong)

    def fill_reference(self, batch: StepBatch) -> None:
        pass

    def fill_device(self, batch: StepBatch) -> None:
        self.filled += 1

    def reference_logits(self, batch: StepBatch) -> Float32:
        last = batch.token[np.cumsum(batch.count) - 1]
        found: Float32 = ((last[:, None] * 7 + np.arange(VOCAB) * 5) % VOCAB).astype(np.float32)
        return found


class FakeDevice:
    def __init__(self, model: FakeModel, wrong: str) -> None:
        self.wake: Callable[[], None] = lambda: None
        self.closed = False
        self._model = model
        self._wrong = wrong
        self._ended: list[StepOutcome] = []

    def launch(self, batch: StepBatch) -> None:
        if self._wrong == "graph":
            logging.getLogger("quire_worker.cuda.cuda_device").error("a step could not be captured")
        raw = self._model.reference_logits(batch)
        token = raw.argmax(axis=1)
        if self._wrong == "token":
            token[-1] = raw[-1].argmin()
        normaliser = np.log(np.exp(raw.astype(np.float64)).sum(axis=1))
        logprob = np.take_along_axis(raw, token[:, None], axis=1)[:, 0] - normaliser
        self._ended = [outcome(token.tolist(), logprob.tolist())]
        self.wake()

    def take_outcomes(self) -> list[StepOutcome]:
        return self._ended

    def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("wrong", ["", "token", "graph"])
def test_a_way_that_is_wrong_fails_alone(wrong: str, tmp_path: Path) -> None:
    recorder, model = Recorder(1, "a machine"), FakeModel(wrong)
    with StepCheck(recorder, cast("CheckModel", model), 16, 64, graphs=True) as check:
        check([StepSize(4), StepSize(16, 32, 4), StepSize(2)], "steps")
    results = {str(line["check"]): (line["result"], str(line["failed"])) for line in recorder.lines}
    graphs, eager = results["steps, as graphs"], results["steps, kernel by kernel"]
    assert model.filled == 6
    assert graphs[0] == ("FAILED" if wrong else "ok") and eager == ("ok", "")
    # A step whose capture failed ran all the same, and right.
    assert graphs[1].startswith({"": "", "token": "StepSize(", "graph": "a step could not be captured"}[wrong])


def test_stage_one_goes_up_to_the_largest_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: dict[str, list[StepSize]] = {}

    class Noted:
        def __init__(self, *_: object, **__: object) -> None: ...
        def __enter__(self) -> Noted:
            return self

        def __exit__(self, *_: object) -> None: ...
        def __call__(self, sizes: list[StepSize], name: str, *, fresh: bool = False) -> None:
            checked[name] = sizes

    monkeypatch.setattr(steps, "StepCheck", Noted)
    monkeypatch.setattr(steps, "CheckModel", lambda *_: None)
    steps.run(Recorder(1, "a machine"), tiny=False)
    padded = {name: sizes for name, sizes in checked.items() if name.startswith("steps of all padded sizes, ")}
    assert len(padded) == 5 and sum(map(len, padded.values())) > 300
    masked = padded["steps of all padded sizes, with masks"]
    assert {(size.filtered, size.controlled) for size in masked} == {(False, False), (True, False), (True, True)}
    assert {size.masked for size in masked} == {True} and any(size.rows for size in masked)
    for tokens in (8192, 16384):
        assert max(size.rows for size in checked[f"full steps of {tokens} tokens"]) == tokens
        assert len(checked[f"steps of up to {tokens} tokens that no size pads"]) >= 3
        fresh = checked[f"steps of up to {tokens} tokens with fresh prompts"]
        assert max(size.rows for size in fresh) == tokens and any(size.decodes for size in fresh)
