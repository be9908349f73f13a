"""What raises while a step is launched on a GPU ends the sequence that is to blame, and no other; what breaks the GPU
ends the device by name. Of the interpreted device, and of CudaDevice itself over the CPU, whose streams are none."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bench.gpu_checks.interpreted_device import InterpretedDevice
from bench.gpu_checks.launching import run_one
from bench.local_engine import LocalEngine
from quire_common.credit import Finish, KvGroup, ModelInfo, PageGeometry
from quire_common.errors import Internal
from quire_common.logit_controls import LogitControls
from quire_common.sequence import Sampling, Sequence, Stop
from quire_worker.cuda import step_extras
from quire_worker.cuda.cuda_device import CudaDevice
from quire_worker.cuda.device_logprobs import DeviceLogprobs
from quire_worker.cuda.step_body import StepBody
from quire_worker.cuda.step_layout import StepLayout, Tiling
from quire_worker.cuda.step_size import StepSize
from quire_worker.engine.ports import Device
from quire_worker.engine.spec import EngineSpec
from quire_worker.engine.step_runner import StepOutcome
from quire_worker.ops.interface import HeadShape
from quire_worker.replica import ServedModel
from quire_worker.sampling.row_controls import RowControls
from quire_worker.step import PromptScores, StepBatch
from tests.fakes.some_processors import PROCESSORS

# The interpreter computes with numpy, which tells of -inf - -inf and the like.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="streams are stood in for"),
]
VOCAB, SLOTS, HIDDEN = 53, 8, 8
TABLE = torch.from_numpy(np.random.default_rng(5).normal(0, 1, (VOCAB, HIDDEN)).astype(np.float32))
HEAD = torch.from_numpy(np.random.default_rng(6).normal(0, 1, (HIDDEN, VOCAB)).astype(np.float32))
NEXT = (TABLE @ HEAD).numpy()
"""[V, V]: what a model that knows the last token alone makes of it."""
OUT_OF_MEMORY = torch.OutOfMemoryError("no room")


class LastTokenModel:
    """Stands for a decoder. `before` is called with the tokens of each step, and may raise."""

    def __init__(self) -> None:
        self.spec = SimpleNamespace(vocab_size=VOCAB)
        self.head_shape = HeadShape(2, 1, 16, 1.0)
        self.before: Callable[[list[int]], None] = lambda _: None

    def forward(self, token: Tensor, _pages: Tensor, plan: Any, _attend: object = None) -> Tensor:
        self.before(token[plan.position >= 0].tolist())
        return TABLE[token.long()]

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden @ HEAD


class _Stream:
    """Neither a stream nor an event of CUDA's: what it is given has ended. Stands for both."""

    def record(self, _stream: object) -> None:
        """Nothing."""

    def synchronize(self) -> None:
        """Nothing."""


def _interpreted(model: LastTokenModel) -> Device:
    spec = EngineSpec(4, 64, VOCAB, 16, 2, (), SLOTS, logits_processors=PROCESSORS)
    return InterpretedDevice(model, torch.zeros(1), spec)  # type: ignore[arg-type]  # a model that is made up


def _cuda(model: LastTokenModel, graphs: Callable[[StepBody, Tiling], Any] = lambda *_: None) -> Device:
    body = StepBody(model, torch.zeros(1), 1 << 16, SLOTS, 32)  # type: ignore[arg-type]  # a model that is made up
    tiling = Tiling.of(model.head_shape, torch.device("cpu"))
    return CudaDevice(body, tiling, graphs(body, tiling), _Stream(), None, PROCESSORS)  # type: ignore[arg-type]  # no stream of CUDA's


@pytest.fixture
def no_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "stream", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "Event", _Stream)
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: self)


@pytest.fixture(params=[_interpreted, _cuda], ids=["interpreted", "cuda"])
def rig(request: pytest.FixtureRequest, no_streams: None) -> Iterator[Rig]:
    model = LastTokenModel()
    device = request.param(model)
    yield Rig(model, device)
    device.close()


@dataclass
class Rig:
    """Sequences of one prompt token each, by slot, all in every step."""

    model: LastTokenModel
    device: Device
    controls: dict[int, RowControls] = field(default_factory=dict)
    logprobs: dict[int, int] = field(default_factory=dict)
    ended: dict[int, StepOutcome] = field(default_factory=dict)

    def asks(self, slot: int, *processors: str, controls: LogitControls | None = None) -> None:
        """What the sequence of a slot asks of its logits."""
        found = RowControls.of(
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
            temperature=np.zeros(n, np.float32),
            top_k=0 * ones,
            top_p=np.ones(n, np.float32),
            min_p=np.zeros(n, np.float32),
            seed=np.zeros(n, np.uint64),
            sample_index=np.zeros(n, np.uint32),
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
                    assert outcome.token[row] == -1 and outcome.finish[row] == Finish.ERROR
                    errors[slot] = position, outcome.failed[row]  # type: ignore[assignment]  # those here are Internal
                else:
                    assert outcome.finish[row] == 0
                    tokens[slot].append(int(outcome.token[row]))
        return tokens, errors

    def alone(self, slot: int, steps: int) -> list[int]:
        """What a sequence says that nobody disturbs."""
        token, said = slot, list[int]()
        controls = self.controls.get(slot)
        own = None if controls is None else RowControls(controls.sequence, PROCESSORS)
        for _ in range(steps):
            row = NEXT[token].copy()
            if own is not None:
                own.apply(row)
            token = int(row.argmax())
            said.append(token)
            if own is not None:
                own.fed(token)
        return said


def test_a_processor_that_raises_in_the_middle_of_a_batch_ends_its_request_alone(rig: Rig) -> None:
    rig.asks(1, "contrary")
    rig.asks(2, "weary")
    rig.asks(3, controls=LogitControls(presence_penalty=3.0))
    tokens, errors = rig.serve([0, 1, 2, 3, 4], 6)
    assert [(slot, step, error.code) for slot, (step, error) in errors.items()] == [(2, 3, "LOGITS_PROCESSOR_FAILED")]
    assert tokens[2] == rig.alone(2, 3)
    for slot in (0, 1, 3, 4):
        assert tokens[slot] == rig.alone(slot, 6), slot


def test_controls_that_cannot_be_applied_end_their_request_alone(rig: Rig) -> None:
    """Beside rows that Python changes, and a row of a sheet."""
    outside = LogitControls(allowed_token_ids=(VOCAB + 40,))
    rig.asks(1, controls=LogitControls(frequency_penalty=2.0))
    rig.asks(2, controls=outside)
    rig.asks(3, "contrary", controls=outside)
    rig.asks(4, "contrary")
    tokens, errors = rig.serve([0, 1, 2, 3, 4], 4)
    assert {slot: (step, error.code) for slot, (step, error) in errors.items()} == {
        2: (0, "STEP_FAILED"),
        3: (0, "STEP_FAILED"),
    }
    for slot in (0, 1, 4):
        assert tokens[slot] == rig.alone(slot, 4), slot


class _Captures:
    """Stands for StepGraphs: a capture launches a step of nobody, and its size serves nobody. `raises`: of that step's
    sequences."""

    def __init__(self, body: StepBody, raises: int) -> None:
        self._body = body
        self._raises = raises

    def find(self, size: StepSize, *, fresh: bool) -> None:
        self._body.advanced = not fresh
        if size.sequences == self._raises:
            raise OUT_OF_MEMORY

    def give_up(self) -> None:
        """There is nothing to make do with."""


@pytest.mark.parametrize("raises", [0, 3])
def test_a_capture_before_a_failed_launch_keeps_nobody_from_running_alone(raises: int, no_streams: None) -> None:
    """It feeds no sequence's token back, whether it comes to an end or not."""
    model = LastTokenModel()
    rig = Rig(model, _cuda(model, lambda body, _: _Captures(body, raises)))
    rig.asks(1, controls=LogitControls(allowed_token_ids=(VOCAB + 40,)))
    tokens, errors = rig.serve([0, 1, 2], 2)
    rig.device.close()
    assert list(errors) == [1]
    assert [tokens[slot] for slot in (0, 2)] == [rig.alone(slot, 2) for slot in (0, 2)]


def test_what_has_no_memory_together_runs_one_by_one(rig: Rig) -> None:
    """And what has none alone ends with an error that says so."""
    rig.asks(1, controls=LogitControls(presence_penalty=3.0))
    rig.logprobs[3] = 2

    def few(tokens: list[int]) -> None:
        if len(tokens) > 2 or 2 in tokens[:1]:
            raise OUT_OF_MEMORY

    rig.model.before = few
    first = rig.step([0, 1, 2, 3], 0)
    assert list(first.failed) == [2] and first.failed[2].code == "GPU_OUT_OF_MEMORY" and first.failed[2].fix
    assert first.logprobs is not None and first.logprobs.token_index.tolist() == [3]
    assert first.logprobs.top_id.tolist() == np.argsort(-NEXT[3])[:2].tolist()
    said = {slot: [int(first.token[slot])] for slot in (0, 1, 3)}
    for position in (1, 2):
        outcome = rig.step([0, 1, 3], position)
        assert not outcome.failed
        for row, slot in enumerate((0, 1, 3)):
            said[slot].append(int(outcome.token[row]))
    assert said == {slot: rig.alone(slot, 3) for slot in said}


def test_logprobs_without_memory_fail_those_that_asked(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OUT_OF_MEMORY

    monkeypatch.setattr(DeviceLogprobs, "start", fail)
    monkeypatch.setattr(step_extras, "start_scores", fail)
    rig.logprobs[1] = 0
    batch = rig.batch([0, 1, 2, 3], 0)
    batch.scores = {2: PromptScores(np.array([7], np.int32), 1)}
    outcome = run_one(rig.device, batch)
    assert {row: error.code for row, error in outcome.failed.items()} == dict.fromkeys((1, 2), "GPU_OUT_OF_MEMORY")
    assert outcome.finish.tolist() == [0, Finish.ERROR, Finish.ERROR, 0]
    assert [outcome.token[row] for row in (0, 3)] == [rig.alone(slot, 1)[0] for slot in (0, 3)]
    after = rig.step([0, 3], 1)
    assert after.token.tolist() == [rig.alone(slot, 2)[1] for slot in (0, 3)]


def test_a_step_that_may_have_fed_tokens_back_is_not_run_again(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """All its sequences end, and the next ones find a device that works."""
    rig.asks(1, "contrary")
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "index_copy_", _raise)
        outcome = rig.step([0, 1, 2], 0)
    assert [error.code for error in outcome.failed.values()] == ["STEP_FAILED"] * 3
    del rig.controls[1]
    assert rig.serve([0, 1, 2], 3) == ({slot: rig.alone(slot, 3) for slot in (0, 1, 2)}, {})


def _raise(*_: object) -> None:
    raise RuntimeError("refused")


@pytest.mark.parametrize("later", [False, True])
def test_an_error_of_cuda_ends_the_device_by_name(
    later: bool, no_streams: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it says so itself, or whoever waits for the stream does."""

    def break_down(_tokens: list[int]) -> None:
        told = "an illegal memory access was encountered"
        raise RuntimeError(f"Triton Error [CUDA]: {told}") if later else torch.AcceleratorError(f"CUDA error: {told}")

    model = LastTokenModel()
    rig = Rig(model, _cuda(model))
    assert not rig.step([0, 1], 0).failed
    model.before = break_down
    if later:
        monkeypatch.setattr(_Stream, "synchronize", _raise)
    for call in (lambda: rig.device.launch(rig.batch([0, 1], 1)), rig.device.finished, rig.device.drain):
        with pytest.raises(Internal) as caught:
            call()
        assert caught.value.code == "DEVICE_BROKEN" and caught.value.fix
    rig.device.close()


def test_a_graph_that_cannot_be_replayed_is_taken_apart_as_well(no_streams: None) -> None:
    model = LastTokenModel()

    class Graph:
        """The body, as it is."""

        def __init__(self, body: StepBody, tiling: Tiling, size: StepSize) -> None:
            self.body = body
            self.layout = StepLayout.of(size, tiling)

        def layout_of(self, _fresh: object, _chunks: int) -> StepLayout:
            return self.layout

        def replay(self, layout: StepLayout) -> None:
            self.body.launch(layout)

        @property
        def logits(self) -> Tensor | None:
            return self.body.logits

    def few(tokens: list[int]) -> None:
        if len(tokens) > 1:
            raise OUT_OF_MEMORY

    rig = Rig(
        model, _cuda(model, lambda body, tiling: SimpleNamespace(find=lambda size, fresh: Graph(body, tiling, size)))
    )
    assert rig.step([0, 1], 0).token.tolist() == [rig.alone(slot, 1)[0] for slot in (0, 1)]
    model.before = few
    assert rig.step([0, 1], 1).token.tolist() == [rig.alone(slot, 2)[1] for slot in (0, 1)]
    rig.device.close()


def test_steps_in_flight_are_told_before_the_one_that_could_not_be_launched(no_streams: None) -> None:
    model = LastTokenModel()
    rig = Rig(model, _cuda(model))
    rig.device.launch(rig.batch([0, 1], 0))

    def few(tokens: list[int]) -> None:
        if len(tokens) > 1:
            raise OUT_OF_MEMORY

    model.before = few
    rig.device.launch(rig.batch([0, 1], 1))
    first, second = rig.device.finished()
    said = {slot: rig.alone(slot, 2) for slot in (0, 1)}
    assert [first.token.tolist(), second.token.tolist()] == [[said[s][step] for s in (0, 1)] for step in (0, 1)]
    rig.device.close()


def test_an_engine_with_steps_in_flight_loses_the_one_request(no_streams: None) -> None:
    """Prompts of many chunks, memory for few rows at a time, and a token that the model cannot stand."""
    model, poison = LastTokenModel(), 13

    def fail(tokens: list[int]) -> None:
        if poison in tokens:
            raise RuntimeError("poisoned")
        if len(tokens) > 40:
            raise OUT_OF_MEMORY

    model.before = fail
    group = KvGroup("full", 1, "", "bfloat16", 1, 1, 16)
    info = ModelInfo("m", "", 64, VOCAB, (), b"", PageGeometry(16, (group,), b"m"), 0, "", ())
    copier: Any = None
    served = ServedModel(lambda spec, _: _cuda(model), copier, info, 40, logits_processors=PROCESSORS)
    local = LocalEngine(served, max_num_seqs=3, max_num_batched_tokens=64)
    processors: dict[int, tuple[str, ...]] = {1: ("contrary",), 3: ("weary",)}
    for handle in range(6):
        prompt = np.full(30, 20 + handle, np.int32)
        prompt[7] = poison if handle == 4 else 1
        local.submit(handle, Sequence(prompt, Stop(5), Sampling(processors=processors.get(handle, ()))))
    found = local.run()
    local.check_quiet()
    assert {handle: each.error for handle, each in found.items() if each.error} == {
        3: "LOGITS_PROCESSOR_FAILED",
        4: "STEP_FAILED",
    }
    assert [len(each.tokens) for each in found.values()] == [5, 5, 5, 3, 0, 5]
    for handle in (0, 2, 3, 5):
        token, said = 20 + handle, found[handle].tokens
        for each in said:
            token = int(NEXT[token].argmax())
            assert token == each
    local.close()
