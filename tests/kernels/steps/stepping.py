"""Sequences that step, and the model that they step on, for tests of whole steps on the device."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quire_common.logit_controls import LogitControls
from quire_common.sequence import Sampling, Sequence, Stop
from quire_worker.cuda.step_body import StepBody
from quire_worker.cuda.step_size import SortedSizes, StepSize
from quire_worker.loading import LoadedModel
from quire_worker.model.arch_spec import ArchSpec
from quire_worker.model.decoder import Decoder
from quire_worker.model.parameters import parameter_specs
from quire_worker.ops.interface import HeadShape
from quire_worker.ops.triton.gemm import GemmConfigs
from quire_worker.ops.triton.triton_ops import TritonOps
from quire_worker.sampling.logits_state import LogitsState
from quire_worker.sampling.param_rows import param_rows
from quire_worker.step import StepBatch
from quire_worker.weights.loader import load_dummy
from quire_worker.weights.parameter_store import ParameterStore
from tests.model.folders import FAMILIES, load_dummy_model

ON_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if ON_GPU else "cpu")
SLOTS, WIDTH, STOPS, WORDS = 6, 8, 3, 16_384
CONTROLS = {
    0: LogitControls(presence_penalty=2.0, repetition_penalty=1.3),
    3: LogitControls(frequency_penalty=1.0, logit_bias=((11, 3.0),), bad_words=((5,), (11, 11))),
    4: LogitControls(allowed_token_ids=tuple(range(0, 90, 2))),
}
"""By slot."""


class TwoModels:
    """One model with the same weights twice: `cpu` is the reference, `decoder` the device's, with `pages` full of
    NaN."""

    def __init__(
        self, folder: Path, family: str, *, even: bool = False, output_gate: bool = False, **changes: Any
    ) -> None:
        """`output_gate` and `changes`: of all layers of the device's model alone."""
        self.cpu: LoadedModel = load_dummy_model(folder, **FAMILIES[family])
        plain = self.cpu.spec
        assert isinstance(plain, ArchSpec)
        layers = tuple(
            dataclasses.replace(layer, mixer=dataclasses.replace(layer.mixer, output_gate=output_gate), **changes)
            for layer in plain.layers
        )
        spec = dataclasses.replace(plain, layers=layers)
        self.shape = HeadShape.of(spec)
        if ON_GPU:
            torch.backends.cuda.matmul.allow_tf32 = False
        specs = parameter_specs(spec)
        stores = ParameterStore(specs), ParameterStore(specs, device=DEVICE)
        load_dummy(specs, stores[0], 1, lambda *_: None)
        for each in specs:
            stores[1].destination(each).copy_(stores[0].destination(each))
        ops = TritonOps(self.shape, DEVICE, GemmConfigs({}, batch_invariant=even))
        self.decoder = Decoder(spec, stores[1], ops, self.cpu.facts.max_model_len)
        self.page_size = self.cpu.geometry.page_size
        self.pages = torch.full_like(self.cpu.runner.pool.tensor, float("nan")).to(DEVICE)

    def body(self) -> StepBody:
        """The device's steps, on pages of their own."""
        return StepBody(self.decoder, self.pages.clone(), WORDS, SLOTS, 2 * SLOTS)


class Sequences:
    """Six slots with prompts of their own; builds the batches that an engine would."""

    def __init__(self, seed: int, vocab: int, page: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.page = page
        self.prompt = [self.rng.integers(0, vocab, n) for n in (1, 5, 17, 33, 40, 20)]
        self.done = [0] * SLOTS
        self.controls = {
            slot: LogitsState(Sequence(self.prompt[slot].astype(np.int32), Stop(200), Sampling(controls=controls)))
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
            params=param_rows(
                n,
                temperature=rng.choice([0.0, 1.0], n),
                top_k=5 if filtered else 0,
                top_p=0.9 if filtered else 1.0,
                seed=rng.integers(0, 2**64, n, dtype=np.uint64),
                sample_index=rng.integers(0, 3, n),
            ),
            logprobs=np.full(n, -1, np.int32),
            slot=slots,
            fed=np.arange(n) < len(decodes),
            last=rng.random(n) < 0.2,
            stop_id=rng.integers(0, 97, (n, STOPS)).astype(np.int32),
        )


def least_that_suits(sizes: Iterable[StepSize], wanted: StepSize) -> StepSize | None:
    """The one of these sizes that a step of the wanted size takes."""
    return SortedSizes(sizes).least_that_suits(wanted)
