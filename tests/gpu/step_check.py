"""StepCheck: steps of given sizes on the devices of one model, beside the float32 reference, which is computed once.

A device runs them as graphs, another, if there are graphs, kernel by kernel; both on the same pages, each after all
that is nobody's has been made NaN again.
"""

from __future__ import annotations

import logging
import time
from types import TracebackType
from typing import Any

import numpy as np
import torch

from bench.gpu.record import Recorder
from quire_worker.arrays import Float32, Int64
from quire_worker.cuda.step_size import StepSize
from quire_worker.engine.ports import StepOutcome
from quire_worker.matcher.mask_ring import MaskRing
from quire_worker.step import StepBatch
from tests.gpu.check_model import CheckModel
from tests.gpu.launching import run_one
from tests.gpu.step_batches import MASK_SLOTS, StepBatches

# How far a log probability may be off, and how much better a token there may have been than the one that was drawn: a
# part of the largest logit. bf16 holds a number to within 2^-9 of itself, errors add up over the layers, and it is the
# worst of hundreds of rows that counts.
TOLERANCE = {True: 2.0**-5, False: 1e-4}


class StepCheck:
    """A context, whose end closes the devices. `graphs`: there are some."""

    def __init__(
        self, recorder: Recorder, model: CheckModel, max_num_seqs: int, max_tokens: int, *, graphs: bool
    ) -> None:
        ring = MaskRing.create(MASK_SLOTS, 2, model.spec.vocab_size)
        # The driver maps an address once, so that each device needs the ring at its own.
        specs = [model.engine_spec(max_num_seqs, ring.of_process(0)) for _ in range(2)]
        ways = {"as graphs": False, "kernel by kernel": True} if graphs else {"kernel by kernel": True}
        self._recorder = recorder
        self._model = model
        self._devices = {
            how: model.make_device(spec, max_tokens, eager=eager)
            for (how, eager), spec in zip(ways.items(), specs, strict=False)
        }
        slots = specs[0].num_slots
        self._drawn: dict[str, Int64] = {how: np.zeros(slots, np.int64) for how in ways}
        self._batches = StepBatches(model.spec.vocab_size, model.page_size, model.num_pages, slots, ring)
        self._errors = _Errors()

    def __enter__(self) -> StepCheck:
        logging.getLogger("quire_worker.cuda").addHandler(self._errors)
        return self

    def __exit__(self, *_: type[BaseException] | BaseException | TracebackType | None) -> None:
        logging.getLogger("quire_worker.cuda").removeHandler(self._errors)
        for device in self._devices.values():
            device.close()

    def __call__(self, sizes: list[StepSize], name: str, *, fresh: bool = False) -> None:
        """A check for each way. `fresh`: long chunks have no past. A step that could not be captured, and ran all the
        same, is a failure."""
        with self._recorder.attempt(name):
            self._check(sizes, name, fresh)

    def _check(self, sizes: list[StepSize], name: str, fresh: bool) -> None:
        began = time.perf_counter()
        worst, failed = dict.fromkeys(self._devices, 0.0), {how: list[str]() for how in self._devices}
        for size in sizes:
            batch = self._batches.make(size, list(self._drawn.values()), fresh=fresh)
            self._model.fill_reference(batch)
            wanted = self._model.reference_logits(batch)
            outcomes = {how: self._run(how, batch, failed[how]) for how in self._devices}
            _feed(batch)
            for how, outcome in outcomes.items():
                off = error(batch, wanted, outcome)
                worst[how] = max(worst[how], off)
                if outcome.failed or not off <= TOLERANCE[self._model.on_gpu]:
                    codes = [each.code for each in outcome.failed.values()][:3]
                    failed[how].append(f"{size}: {off:.3g} {codes}")
        took = time.perf_counter() - began
        for how, bad in failed.items():
            told = "; ".join(bad[:5])
            self._recorder.check(
                f"{name}, {how}", not bad, sizes=len(sizes), worst=worst[how], failed=told, both_ways_s=round(took, 1)
            )

    def _run(self, how: str, batch: StepBatch, failed: list[str]) -> StepOutcome:
        self._model.fill_device(batch)
        if batch.constraints:
            _place(self._devices[how], batch)
        outcome = run_one(self._devices[how], batch)
        failed += self._errors.told
        self._errors.told.clear()
        self._drawn[how][batch.slot] = np.maximum(outcome.token[:, 0], 0)
        return outcome


def error(batch: StepBatch, raw: Float32, outcome: StepOutcome) -> float:
    """How far log probabilities are off, and how much better a token there was than the one that was drawn; as a part
    of the row's largest logit."""
    if outcome.logprobs is None or (outcome.token < 0).any():
        return float("inf")
    worst = 0.0
    normaliser = np.log(np.exp(raw - raw.max(axis=1, keepdims=True)).sum(axis=1)) + raw.max(axis=1)
    for row, token in enumerate(outcome.token[:, 0].tolist()):
        off = abs(float(outcome.logprobs.logprob[row] - (raw[row, token] - normaliser[row])))
        changed = raw[row].copy()
        controls = batch.controls.get(row)
        mask = None
        if row in batch.constraints:
            mask = batch.constraints[row].mask_at(int(batch.position[row] + batch.count[row]))
        if mask is not None:
            mask.restrict(changed)
        if controls is not None:
            controls.apply(changed, mask=mask)
        least = np.partition(changed, -5)[-5] if batch.params["temperature"][row] > 0 else changed.max()
        better = float(least - changed[token])
        # NaN is no number that another is larger than.
        if not (np.isfinite(off) and np.isfinite(better)):
            return float("inf")
        worst = max(worst, max(off, better) / max(1.0, float(np.abs(raw[row]).max())))
    return worst


def _place(device: Any, batch: StepBatch) -> None:
    """Tell a device where the batch's sequences stand, as its steps before would have."""
    masks, there = device._body.masks, torch.from_numpy
    slots = there(batch.slot.astype(np.int64)).to(masks._known.device)
    masks._known[slots] = there(batch.position).to(masks._known.device)
    masks._held.zero_()
    if masks._known.is_cuda:
        # Steps run on a stream that does not wait for this one.
        torch.cuda.synchronize()


def _feed(batch: StepBatch) -> None:
    """Tell the reference's controls what the device's are told by the step itself."""
    for row, controls in batch.controls.items():
        if batch.fed[row]:
            controls.fed(int(batch.token[row]))


class _Errors(logging.Handler):
    """Keeps what a device says of graphs that it could not capture."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.told: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.told.append(record.getMessage())
