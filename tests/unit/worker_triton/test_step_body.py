"""A whole step on the device against the CPU's: packed, padded, fed back, sampled, stopped; decoding and mixed."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

from quire_common.logit_controls import LogitControls
from quire_common.sequence import Sampling, Sequence, Stop
from quire_worker.cuda.control_sheets import ControlSheets
from quire_worker.cuda.step_body import StepBody
from quire_worker.cuda.step_layout import StepLayout, Tiling
from quire_worker.cuda.step_size import StepSize, decode_sizes, graph_sizes, least_that_holds
from quire_worker.engine.step_runner import StepRunner
from quire_worker.model.decoder import Decoder
from quire_worker.model.parameters import parameter_specs
from quire_worker.ops.interface import HeadShape
from quire_worker.ops.triton import fresh_attention
from quire_worker.ops.triton.fresh_attention import Fresh, FreshPlans
from quire_worker.ops.triton.products import Products
from quire_worker.ops.triton.triton_ops import TritonOps
from quire_worker.sampling.row_controls import RowControls
from quire_worker.step import StepBatch
from quire_worker.weights.loader import load_dummy
from quire_worker.weights.parameter_store import ParameterStore
from tests.unit.worker_model.folders import FAMILIES, load_dummy_model

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
# The interpreter computes with numpy, which tells of exp(-inf - most) and the like.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")
SLOTS, WIDTH, STOPS, WORDS = 6, 8, 3, 16_384
CONTROLS = {
    0: LogitControls(presence_penalty=2.0, repetition_penalty=1.3),
    3: LogitControls(frequency_penalty=1.0, logit_bias=((11, 3.0),), bad_words=((5,), (11, 11))),
    4: LogitControls(allowed_token_ids=tuple(range(0, 90, 2))),
}
"""By slot."""


class Sequences:
    """Six slots with prompts of their own; builds the batches that an engine would."""

    def __init__(self, seed: int, vocab: int, page: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.page = page
        self.prompt = [self.rng.integers(0, vocab, n) for n in (1, 5, 17, 33, 40, 20)]
        self.done = [0] * SLOTS
        self.controls = {
            slot: RowControls(Sequence(self.prompt[slot].astype(np.int32), Stop(200), Sampling(controls=controls)))
            for slot, controls in CONTROLS.items()
        }
        self.pages = (self.rng.permutation(SLOTS * WIDTH) + 1).reshape(SLOTS, WIDTH).astype(np.int32)

    def batch(self) -> StepBatch:
        decodes = [s for s in range(SLOTS) if self.done[s] >= len(self.prompt[s]) and self.rng.random() < 0.8]
        fresh = [s for s in range(SLOTS) if self.done[s] < len(self.prompt[s])][: self.rng.integers(0, 3)]
        if not decodes and not fresh:
            fresh = [s for s in range(SLOTS) if self.done[s] < len(self.prompt[s])][:1] or [0]
            if self.done[0] >= len(self.prompt[0]) and fresh == [0]:
                decodes, fresh = [0], []
        chunks = [self.prompt[s][self.done[s] : self.done[s] + int(self.rng.integers(1, 20))] for s in fresh]
        slots = np.array(decodes + fresh, np.int32)
        count = np.array([1] * len(decodes) + [len(c) for c in chunks], np.int32)
        position = np.array([self.done[s] for s in slots], np.int32)
        end = position + count
        n, rng = len(slots), self.rng
        filtered = bool(rng.random() < 0.3)
        for s, e in zip(slots.tolist(), end.tolist(), strict=True):
            self.done[s] = e
        sample = [e >= len(self.prompt[s]) for s, e in zip(slots, end, strict=True)]
        return StepBatch(
            token=np.concatenate([np.zeros(len(decodes), np.int64), *chunks]).astype(np.int64),
            count=count,
            position=position,
            page_table=self.pages[slots, : -(-int(end.max()) // self.page)],
            sample=np.array(sample),
            controls={r: self.controls[s] for r, s in enumerate(slots.tolist()) if s in self.controls and sample[r]},
            temperature=rng.choice([0.0, 1.0], n).astype(np.float32),
            top_k=np.full(n, 5 if filtered else 0, np.int32),
            top_p=np.full(n, 0.9 if filtered else 1.0, np.float32),
            min_p=np.zeros(n, np.float32),
            seed=rng.integers(0, 2**64, n, dtype=np.uint64),
            sample_index=rng.integers(0, 3, n).astype(np.uint32),
            logprobs=np.full(n, -1, np.int32),
            slot=slots,
            fed=np.arange(n) < len(decodes),
            last=rng.random(n) < 0.2,
            stop_id=rng.integers(0, 97, (n, STOPS)).astype(np.int32),
        )


# The interpreter takes seconds for a step.
@pytest.mark.parametrize("family", ["llama-32", "qwen3"] if ON_GPU else ["qwen3"])
@pytest.mark.parametrize("even", [False, True])
def test_steps_come_to_what_the_cpu_says(
    family: str, even: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cpu = load_dummy_model(tmp_path / "model", **FAMILIES[family])
    spec = cpu.spec
    shape = HeadShape.of(spec)
    ops = TritonOps(shape, DEVICE, Products({}, even=even))
    if ON_GPU:
        torch.backends.cuda.matmul.allow_tf32 = False
    specs = parameter_specs(spec)
    stores = ParameterStore(specs), ParameterStore(specs, device=DEVICE)
    load_dummy(specs, stores[0], 1, lambda *_: None)
    for each in specs:
        stores[1].destination(each).copy_(stores[0].destination(each))
    decoder = Decoder(spec, stores[1], ops, cpu.facts.max_model_len)
    page = cpu.geometry.page_size
    pages = torch.full_like(cpu.runner.pool.tensor, float("nan")).to(DEVICE)
    reference = StepRunner(cpu.runner)
    monkeypatch.setattr(fresh_attention, "PIECE", 8)
    suited = FreshPlans.suit(shape, any(spec.windows)) and not even
    body = StepBody(decoder, pages, WORDS, SLOTS, 2 * SLOTS)
    sequences = Sequences(3, spec.vocab_size, page)
    sheets = ControlSheets(DEVICE, spec.vocab_size)
    mixed = controlled = whole = 0
    for turn in range(60 if ON_GPU else 6):
        batch = sequences.batch()
        if max(sequences.done) >= WIDTH * page - 1:
            break
        # The reference writes what is fed into `token`, and tells the controls of it.
        wanted = reference.run(dataclasses.replace(batch, token=batch.token.copy()))
        decodes = int(batch.fed.sum())
        chunks = len(batch.count) - decodes
        mixed += bool(decodes and chunks)
        size = StepSize(
            decodes + 2,
            (len(batch.token) - decodes + 5) if chunks else 0,
            chunks + 1 if chunks else 0,
            True,
            bool(batch.controls),
        )
        controlled += bool(batch.controls)
        first = np.cumsum(batch.count) - batch.count
        fresh = tuple(
            Fresh(int(first[each]) - decodes, int(batch.count[each]))
            for each in np.flatnonzero((batch.position == 0) & (batch.count > 3))
            if suited and turn % 2
        )
        whole += len(fresh)
        rows = max([size.rows, *(chunk.row + chunk.padded for chunk in fresh)])
        layout = StepLayout.of(dataclasses.replace(size, rows=rows), Tiling.of(shape, even=even))
        layout = layout.leaving(fresh, chunks) if fresh else layout
        host = np.full(WORDS, 12345, np.int32)
        used = layout.pack(batch, host, sheets.addresses(batch))
        body.uploaded[:used].copy_(torch.from_numpy(host[:used]))
        body.launch(layout)
        places = np.arange(len(batch.count))
        places[decodes:] += 2
        token = body.results[: size.sequences].cpu().numpy()[places]
        finish = body.results[size.sequences : 2 * size.sequences].cpu().numpy()[places]
        drawn = batch.sample
        assert token[drawn].tolist() == wanted.token[drawn].tolist()
        assert (token[~drawn] == -1).all()
        assert finish[drawn].tolist() == wanted.finish[drawn].tolist()
    assert mixed >= 1 and controlled >= 2
    assert bool(whole) == suited


def test_sizes() -> None:
    assert decode_sizes(40) == [1, 2, 4, 8, 16, 24, 32, 40]
    assert decode_sizes(400)[-3:] == [320, 384, 400]
    sizes = graph_sizes(256, 2048)
    assert sizes[0] == StepSize(1) and len(sizes) == len(set(sizes))
    assert least_that_holds(sizes, StepSize(5)) == StepSize(8)
    assert least_that_holds(sizes, StepSize(5, filtered=True)) == StepSize(8, filtered=True)
    assert least_that_holds(sizes, StepSize(5, controlled=True)) == StepSize(8, filtered=True, controlled=True)
    advance = [size for size in sizes if size.in_advance and size.controlled]
    assert advance == [StepSize(1, filtered=True, controlled=True)]
    assert least_that_holds(sizes, StepSize(3, 100, 2)) == StepSize(16, 128, 64)
    assert least_that_holds(sizes, StepSize(3, 5000, 2)) is None


def test_full_steps_have_graphs_that_waste_little() -> None:
    sizes = graph_sizes(512, 8192)
    assert sizes[0] == StepSize(1) and len(sizes) == len(set(sizes))
    for decodes in range(0, 513, 7):
        step = StepSize(decodes, 8192 - decodes, 20)
        found = least_that_holds(sizes, step)
        assert found is not None and found.total_rows <= 1.02 * 8192, step
        assert found.rows <= 8192 and found.holds(step)
    assert least_that_holds(sizes, StepSize(0, 7800, 20)) == StepSize(0, 8192, 64)
    assert least_that_holds(sizes, StepSize(0, 7000, 20)) is None
    assert least_that_holds(sizes, StepSize(0, 8192, 65)) is None
    assert least_that_holds(sizes, StepSize(3, 3100, 2)) == StepSize(16, 4096, 64)
    assert StepSize(0, 20, 20) in graph_sizes(4, 20) and StepSize(4, 20, 20) in graph_sizes(4, 20)
    assert StepSize(0, 3000, 64) in graph_sizes(256, 3000)
