"""Sequences of one prompt token each on a device whose model knows the last token alone, and whose streams are none."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from quire_common.credit import Finish
from quire_common.errors import Internal
from quire_common.logit_controls import LogitControls
from quire_common.sequence import Sampling, Sequence, Stop
from quire_worker.cuda.cuda_device import CudaDevice
from quire_worker.cuda.masks.device_masks import DeviceMasks
from quire_worker.cuda.step_body import StepBody
from quire_worker.cuda.step_layout import Tiling
from quire_worker.engine.ports import Device, StepOutcome
from quire_worker.engine.spec import STEP_TIMEOUT_S, EngineSpec
from quire_worker.matcher.mask_ring import MaskRing
from quire_worker.ops.interface import HeadShape
from quire_worker.sampling.logits_state import LogitsState
from quire_worker.sampling.param_rows import param_rows
from quire_worker.step import StepBatch
from tests.fakes.worker.some_processors import PROCESSORS
from tests.gpu.interpreted_device import InterpretedDevice
from tests.gpu.launching import run_one

VOCAB, SLOTS, HIDDEN = 53, 20, 8
TABLE = torch.from_numpy(np.random.default_rng(5).normal(0, 1, (VOCAB, HIDDEN)).astype(np.float32))
HEAD = torch.from_numpy(np.random.default_rng(6).normal(0, 1, (HIDDEN, VOCAB)).astype(np.float32))
NEXT = (TABLE @ HEAD).numpy()
"""[V, V]: what a model that knows the last token alone makes of it."""


class LastTokenModel:
    """Stands for a decoder. `before` is called with the tokens of each step, and may raise."""

    def __init__(self) -> None:
        self.spec = SimpleNamespace(vocab_size=VOCAB)
        self.head_shape = HeadShape(2, 1, 16, 1.0)
        self.before: Callable[[list[int]], None] = lambda _: None

    def forward(
        self, token: Tensor, _pages: Tensor, plan: Any, _attend: object = None, output_rows: Tensor | None = None
    ) -> Tensor:
        self.before(token[plan.position >= 0].tolist())
        return TABLE[token.long() if output_rows is None else token.long()[output_rows]]

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden @ HEAD


class NoStream:
    """Neither a stream nor an event of CUDA's: what it is given has ended. Stands for both."""

    def record(self, _stream: object) -> None:
        """Nothing."""

    def synchronize(self) -> None:
        """Nothing."""

    def query(self) -> bool:
        """It has."""
        return True


def interpreted_device(model: LastTokenModel, *, masks: MaskRing | None = None) -> Device:
    spec = EngineSpec(4, 64, VOCAB, 16, 2, (), slots=SLOTS, logits_processors=PROCESSORS, masks=masks)
    return InterpretedDevice(model, torch.zeros(1), spec)  # type: ignore[arg-type]  # a model that is made up


def cuda_device(
    model: LastTokenModel,
    graphs: Callable[[StepBody, Tiling], Any] = lambda *_: None,
    *,
    masks: MaskRing | None = None,
    step_timeout_s: float = STEP_TIMEOUT_S,
) -> Device:
    pages = torch.zeros(1)
    there = None if masks is None else DeviceMasks(masks, pages.device, SLOTS, 32)
    body = StepBody(model, pages, 1 << 16, SLOTS, 32, there)  # type: ignore[arg-type]  # a model that is made up
    tiling = Tiling.of(model.head_shape, torch.device("cpu"))
    stream: Any = NoStream()
    return CudaDevice(body, tiling, graphs(body, tiling), stream, None, PROCESSORS, step_timeout_s)


def without_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """From here on CUDA's streams and events are none."""
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "Event", NoStream)
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: self)


@dataclass
class Rig:
    """Sequences of one prompt token each, by slot, all in every step."""

    model: LastTokenModel
    device: Device
    controls: dict[int, LogitsState] = field(default_factory=dict)
    logprobs: dict[int, int] = field(default_factory=dict)
    ended: dict[int, StepOutcome] = field(default_factory=dict)

    def asks(self, slot: int, *processors: str, controls: LogitControls | None = None) -> None:
        """What the sequence of a slot asks of its logits."""
        found = LogitsState.of(
            Sequence(np.array([slot], np.int32), Stop(40), Sampling(processors=processors, controls=controls)),
            PROCESSORS,
        )
        assert found is not None
        self.controls[slot] = found

    def batch(self, slots: list[int], position: int) -> StepBatch:
        """A step: the prompt's token, which is the slot's number, or what was drawn."""
        n = len(slots)
        ones = np.ones(n, np.int32)
        return StepBatch(
            token=np.array(slots if position == 0 else [0] * n, np.int64),
            count=ones,
            position=ones * position,
            page_table=ones[:, None],
            sample=np.ones(n, np.bool_),
            params=param_rows(n),
            logprobs=np.array([self.logprobs.get(slot, -1) for slot in slots], np.int32),
            controls={row: self.controls[slot] for row, slot in enumerate(slots) if slot in self.controls},
            slot=np.array(slots, np.int32),
            fed=np.full(n, position > 0),
            last=np.zeros(n, np.bool_),
            stop_id=-ones[:, None],
        )

    def step(self, slots: list[int], position: int) -> StepOutcome:
        return run_one(self.device, self.batch(slots, position))

    def serve(self, slots: list[int], steps: int) -> tuple[dict[int, list[int]], dict[int, tuple[int, Internal]]]:
        """Tokens by slot, and the step and error of those that failed, which leave."""
        tokens: dict[int, list[int]] = {slot: [] for slot in slots}
        errors: dict[int, tuple[int, Internal]] = {}
        for position in range(steps):
            running = [slot for slot in slots if slot not in errors]
            outcome = self.step(running, position)
            for row, slot in enumerate(running):
                if row in outcome.failed:
                    assert outcome.token[row, 0] == -1 and outcome.finish[row] == Finish.ERROR
                    errors[slot] = position, outcome.failed[row]  # type: ignore[assignment]  # those here are Internal
                else:
                    assert outcome.finish[row] == 0
                    tokens[slot].append(int(outcome.token[row, 0]))
        return tokens, errors

    def alone(self, slot: int, steps: int) -> list[int]:
        """What a sequence says that nobody disturbs."""
        token, said = slot, list[int]()
        controls = self.controls.get(slot)
        own = None if controls is None else LogitsState(controls.sequence, PROCESSORS)
        for _ in range(steps):
            row = NEXT[token].copy()
            if own is not None:
                own.apply(row)
            token = int(row.argmax())
            said.append(token)
            if own is not None:
                own.fed(token)
        return said
