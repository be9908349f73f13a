"""Stage 1: kernels against float32 references.

First full steps, which are the longest graphs, and steps with fresh prompts, which are captured in pieces. Then the
tests of tests/unit/worker_triton, on whatever device there is, and whole steps of every padded size: decoding, prefill
and mixed, with filters and with controls, as graphs and kernel by kernel; NaN in every page and place that is not a
sequence's own, and in memory that kernels have not written yet.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from bench.gpu_checks.check_model import CheckModel
from bench.gpu_checks.launching import run_one
from bench.gpu_checks.record import Recorder
from quire_common.logit_controls import LogitControls
from quire_common.sequence import Sampling, Sequence, Stop
from quire_worker.cuda.step_size import MOST_CHUNKS, MOST_PADDED_ROWS, StepSize, graph_sizes, pieced_sizes
from quire_worker.engine.ports import Device
from quire_worker.engine.step_runner import StepOutcome
from quire_worker.ops.triton.fresh_attention import LEAST_TOKENS, PIECE
from quire_worker.sampling.row_controls import RowControls
from quire_worker.step import Float32, Int32, Int64, StepBatch

ROOT = Path(__file__).resolve().parents[2]
# How far a log probability may be off, and how much better a token there may have been than the one that was drawn: a
# part of the largest logit. bf16 holds a number to within 2^-9 of itself, errors add up over the layers, and it is the
# worst of hundreds of rows that counts.
_TOLERANCE = {True: 2.0**-5, False: 1e-4}
_MAX_SEQS, _MAX_TOKENS, _FULL_TOKENS = 256, 2048, 8192
_CONTROLS = LogitControls(presence_penalty=1.5, repetition_penalty=1.2, logit_bias=((7, 4.0),), bad_words=((9,),))


def run(recorder: Recorder, *, tiny: bool) -> None:
    """All of it; `tiny`: a few sizes, and one of the tests' files."""
    if not tiny:
        with tempfile.TemporaryDirectory() as folder, _poisoned_memory():
            _check_full_steps(recorder, CheckModel(Path(folder), 1536))
    # Those of this very check are other stages.
    tests = ["tests/unit/worker_triton", "--ignore=tests/unit/worker_triton/test_gpu_check.py"]
    tests = ["tests/unit/worker_triton/test_memory.py"] if tiny else tests
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", *tests],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    told = done.stdout.strip().splitlines()
    failed = next((line for line in told if line.startswith(("FAILED", "ERROR"))), "")
    recorder.check(
        "unit tests of kernels",
        done.returncode == 0,
        told=told[-1][:200] if told else done.stderr[-200:],
        failed=failed,
    )
    sizes = _tiny_sizes() if tiny else graph_sizes(_MAX_SEQS, _MAX_TOKENS)
    seqs = 3 if tiny else _MAX_SEQS
    with tempfile.TemporaryDirectory() as folder, _poisoned_memory():
        model = CheckModel(Path(folder), 64 if tiny else 1536)
        for eager in (True,) if tiny else (False, True):
            device = model.make_device(model.engine_spec(seqs), 64 if tiny else _MAX_TOKENS, eager=eager)
            try:
                how = "kernel by kernel" if eager else "as graphs"
                _check_sizes(recorder, model, device, sizes, f"steps of all sizes, {how}", _nothing_drawn())
            finally:
                device.close()


def _check_full_steps(recorder: Recorder, model: CheckModel) -> None:
    """Steps of more rows than the padded sizes have: without fresh prompts as graphs, with them in pieces."""
    full = [size for size in graph_sizes(_MAX_SEQS, _FULL_TOKENS) if size.rows > MOST_PADDED_ROWS]
    pieced = pieced_sizes(_MAX_SEQS, _FULL_TOKENS, PIECE)
    pieced = [replace(size, rows=size.rows - PIECE) for size in pieced[:14] + pieced[14::9]]
    for eager in (False, True):
        device = model.make_device(model.engine_spec(_MAX_SEQS), _FULL_TOKENS, eager=eager)
        try:
            drawn = _nothing_drawn()
            if not eager:
                _check_sizes(recorder, model, device, full, f"full steps ({_FULL_TOKENS} tokens) as graphs", drawn)
            how = "kernel by kernel" if eager else "in pieces"
            _check_sizes(recorder, model, device, pieced, f"steps with fresh prompts, {how}", drawn, fresh=True)
        finally:
            device.close()


def _tiny_sizes() -> list[StepSize]:
    return [StepSize(3), StepSize(2, 32, 2, filtered=True, controlled=True)]


class _poisoned_memory:  # noqa: N801  # a context manager, named as one
    """New memory holds NaN while it lasts."""

    def __enter__(self) -> None:
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]  # torch's

    def __exit__(self, *_: object) -> None:
        torch.use_deterministic_algorithms(False)


def _nothing_drawn() -> Int64:
    """What a new device drew last, by slot."""
    return np.zeros(_MAX_SEQS + MOST_CHUNKS, np.int64)


def _check_sizes(
    recorder: Recorder,
    model: CheckModel,
    device: Device,
    sizes: list[StepSize],
    name: str,
    drawn: Int64,
    *,
    fresh: bool = False,
) -> None:
    """`drawn`: see `_nothing_drawn`; kept up to date, for the next check of the same device."""
    rng = np.random.default_rng(1)
    worst, failed = 0.0, list[str]()
    for index, size in enumerate(sizes):
        batch = _batch(model, size, rng, drawn, fresh=fresh)
        model.fill_pages(batch, index)
        wanted = model.reference_logits(batch)
        outcome = run_one(device, batch)
        drawn[batch.slot] = np.maximum(outcome.token, 0)
        _feed(batch)
        error = _error(batch, wanted, outcome)
        worst = max(worst, error)
        if outcome.failed or not error <= _TOLERANCE[model.on_gpu]:
            failed.append(f"{size}: {error:.3g} {[each.code for each in outcome.failed.values()][:3]}")
    told = "; ".join(failed[:5])
    recorder.check(name, not failed, sizes=len(sizes), worst=worst, failed=told)


def _error(batch: StepBatch, raw: Float32, outcome: StepOutcome) -> float:
    """How far log probabilities are off, and how much better a token there was than the one that was drawn; as a part
    of the row's largest logit."""
    if outcome.logprobs is None or (outcome.token < 0).any():
        return float("inf")
    worst = 0.0
    normaliser = np.log(np.exp(raw - raw.max(axis=1, keepdims=True)).sum(axis=1)) + raw.max(axis=1)
    for row, token in enumerate(outcome.token.tolist()):
        off = abs(float(outcome.logprobs.logprob[row] - (raw[row, token] - normaliser[row])))
        changed = raw[row].copy()
        controls = batch.controls.get(row)
        if controls is not None:
            controls.apply(changed)
        least = np.partition(changed, -5)[-5] if batch.temperature[row] > 0 else changed.max()
        worst = max(worst, max(off, float(least - changed[token])) / max(1.0, float(np.abs(raw[row]).max())))
    return worst


def _batch(
    model: CheckModel, size: StepSize, rng: np.random.Generator, drawn: Int64, *, fresh: bool = False
) -> StepBatch:
    """Sequences with a past that nearly fill a size; decode rows compute what was drawn last in their slot. `fresh`:
    long chunks have no past."""
    decodes = max(0, size.decodes - int(rng.integers(0, 2))) if size.decodes > 1 else size.decodes
    chunks = min(size.chunks, size.rows, int(rng.integers(1, 5))) if size.rows else 0
    cut = (
        np.sort(rng.choice(np.arange(1, size.rows), chunks - 1, replace=False)) if chunks > 1 else np.empty(0, np.int64)
    )
    count = np.concatenate([np.ones(decodes, np.int32), np.diff([0, *cut, size.rows])[: max(chunks, 0)]]).astype(
        np.int32
    )
    rows = len(count)
    position = rng.integers(0, 3 * model.page_size, rows).astype(np.int32)
    # Full steps have graphs where no prompt is fresh.
    position[: rows if size.rows > MOST_PADDED_ROWS else decodes] += 1
    position[fresh & (count >= LEAST_TOKENS)] = 0
    need = -(-(position + count) // model.page_size)
    pages = rng.permutation(np.arange(1, model.num_pages)).astype(np.int32)
    table: Int32 = np.zeros((rows, int(need.max())), np.int32)
    at = 0
    for row, pages_needed in enumerate(need.tolist()):
        table[row, :pages_needed] = pages[at : at + pages_needed]
        at += pages_needed
    token = rng.integers(0, model.spec.vocab_size, int(count.sum()))
    token[:decodes] = drawn[:decodes]
    asks = rng.random(rows) < 0.5
    controls: dict[int, RowControls] = {}
    if size.controlled:
        ids = token[-8:].astype(np.int32)
        for row in range(0, rows, 2):
            controls[row] = RowControls(Sequence(ids, Stop(50), Sampling(controls=_CONTROLS)))
    return StepBatch(
        token=token,
        count=count,
        position=position,
        page_table=table,
        sample=np.ones(rows, np.bool_),
        temperature=np.where(asks & size.filtered, 1.0, 0.0).astype(np.float32),
        top_k=np.where(asks & size.filtered, 5, 0).astype(np.int32),
        top_p=np.ones(rows, np.float32),
        min_p=np.zeros(rows, np.float32),
        seed=rng.integers(0, 2**64, rows, dtype=np.uint64),
        sample_index=np.zeros(rows, np.uint32),
        logprobs=np.zeros(rows, np.int32),
        controls=controls,
        slot=np.arange(rows, dtype=np.int32),
        fed=np.arange(rows) < decodes,
        last=np.zeros(rows, np.bool_),
        stop_id=np.full((rows, 2), -1, np.int32),
    )


def _feed(batch: StepBatch) -> None:
    """Tell the reference's controls what the device's are told by the step itself."""
    for row, controls in batch.controls.items():
        if batch.fed[row]:
            controls.fed(int(batch.token[row]))
