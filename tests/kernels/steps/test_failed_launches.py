"""What raises while a step is launched on a GPU ends the sequence that is to blame, and no other; what breaks the GPU
ends the device by name. Of the interpreted device, and of CudaDevice itself over the CPU, whose streams are none."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from bench.harness.local_engine import LocalEngine
from quire_common.credit import Finish, KvGroup, ModelInfo, PageGeometry
from quire_common.errors import Internal
from quire_common.logit_controls import LogitControls
from quire_common.sequence import Sampling, Sequence, Stop
from quire_worker.cuda import cuda_device as cuda_device_module
from quire_worker.cuda import step_extras
from quire_worker.cuda.device_logprobs import DeviceLogprobs
from quire_worker.cuda.masks.device_masks import DeviceMasks
from quire_worker.cuda.step_body import StepBody
from quire_worker.cuda.step_layout import StepLayout, Tiling
from quire_worker.cuda.step_size import StepSize
from quire_worker.matcher.mask_ring import MaskRing
from quire_worker.replica import ServedModel
from quire_worker.step import PromptScores
from tests.fakes.worker.some_processors import PROCESSORS
from tests.gpu.launching import run_one
from tests.kernels.steps.launch_rig import (
    NEXT,
    VOCAB,
    LastTokenModel,
    NoStream,
    Rig,
    cuda_device,
    interpreted_device,
    without_streams,
)

# The interpreter computes with numpy, which tells of -inf - -inf and the like.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning"),
    pytest.mark.skipif(torch.cuda.is_available(), reason="streams are stood in for"),
]
OUT_OF_MEMORY = torch.OutOfMemoryError("no room")


@pytest.fixture
def no_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    without_streams(monkeypatch)


@pytest.fixture(params=[interpreted_device, cuda_device], ids=["interpreted", "cuda"])
def rig(request: pytest.FixtureRequest, no_streams: None) -> Iterator[Rig]:
    model = LastTokenModel()
    device = request.param(model)
    yield Rig(model, device)
    device.close()


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
    rig = Rig(model, cuda_device(model, lambda body, _: _Captures(body, raises)))
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
    said = {slot: [int(first.token[slot, 0])] for slot in (0, 1, 3)}
    for position in (1, 2):
        outcome = rig.step([0, 1, 3], position)
        assert not outcome.failed
        for row, slot in enumerate((0, 1, 3)):
            said[slot].append(int(outcome.token[row, 0]))
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
    assert [outcome.token[row, 0] for row in (0, 3)] == [rig.alone(slot, 1)[0] for slot in (0, 3)]
    after = rig.step([0, 3], 1)
    assert after.token[:, 0].tolist() == [rig.alone(slot, 2)[1] for slot in (0, 3)]


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
    rig = Rig(model, cuda_device(model))
    assert not rig.step([0, 1], 0).failed
    model.before = break_down
    if later:
        monkeypatch.setattr(NoStream, "query", _raise)
    for call in (lambda: rig.device.launch(rig.batch([0, 1], 1)), rig.device.take_outcomes, rig.device.drain):
        with pytest.raises(Internal) as caught:
            call()
        assert caught.value.code == "DEVICE_BROKEN" and caught.value.fix
    rig.device.close()


@pytest.mark.parametrize("alone", [False, True])
def test_a_gpu_that_hangs_after_a_failed_launch_ends_the_device_by_name(
    alone: bool, no_streams: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the stream hangs, or a sequence that runs alone. The model thread waits as long as for one step."""
    model, ring = LastTokenModel(), MaskRing.create(1, 1, VOCAB)
    rig = Rig(model, cuda_device(model, masks=ring, step_timeout_s=1.0))
    assert not rig.step([0, 1], 0).failed

    def few(tokens: list[int]) -> None:
        if len(tokens) > 1:
            raise OUT_OF_MEMORY

    model.before = few
    answers = iter([True] if alone else [])
    monkeypatch.setattr(NoStream, "query", lambda _: next(answers, False))
    monkeypatch.setattr(cuda_device_module, "CLOSE_LIMIT_S", 0.1)
    began_s = time.monotonic()
    for call in (lambda: rig.device.launch(rig.batch([0, 1], 1)), rig.device.take_outcomes, rig.device.drain):
        with pytest.raises(Internal) as caught:
            call()
        assert caught.value.code == "DEVICE_HUNG" and caught.value.fix
    rig.device.close()
    assert 1.0 <= time.monotonic() - began_s < 1.9
    ring.close()


def test_masks_whose_reading_hangs_after_a_failed_launch_end_the_device_by_name(
    no_streams: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, ring = LastTokenModel(), MaskRing.create(1, 1, VOCAB)
    device: Any = cuda_device(model, masks=ring, step_timeout_s=0.2)
    rig = Rig(model, device)
    asked: list[None] = []

    class Reading(NoStream):
        """The stream on which masks are read. Its kernel never ends."""

        def query(self) -> bool:
            asked.append(None)
            return False

        def synchronize(self) -> None:
            raise AssertionError("a wait without a limit")

    def fail(_tokens: list[int]) -> None:
        raise OUT_OF_MEMORY

    monkeypatch.setattr(device._body.masks, "_stream", Reading())
    model.before = fail
    with pytest.raises(Internal) as caught:
        device.launch(rig.batch([0, 1], 0))
    assert caught.value.code == "DEVICE_HUNG" and asked
    device.close()
    ring.close()


def test_masks_counters_are_0_after_a_reset(no_streams: None, monkeypatch: pytest.MonkeyPatch) -> None:
    ring = MaskRing.create(1, 1, VOCAB)
    masks: Any = DeviceMasks(ring, torch.device("cpu"), 1, 1)
    monkeypatch.setattr(masks, "_stream", NoStream())
    masks._arrived.fill_(1)
    waits: list[bool] = []
    masks.reset(lambda is_done: waits.append(is_done()))
    assert not masks._arrived.any() and waits == [True, True]
    masks.close()
    ring.close()


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
        model,
        cuda_device(model, lambda body, tiling: SimpleNamespace(find=lambda size, fresh: Graph(body, tiling, size))),
    )
    assert rig.step([0, 1], 0).token[:, 0].tolist() == [rig.alone(slot, 1)[0] for slot in (0, 1)]
    model.before = few
    assert rig.step([0, 1], 1).token[:, 0].tolist() == [rig.alone(slot, 2)[1] for slot in (0, 1)]
    rig.device.close()


def test_steps_in_flight_are_told_before_the_one_that_could_not_be_launched(no_streams: None) -> None:
    model = LastTokenModel()
    rig = Rig(model, cuda_device(model))
    rig.device.launch(rig.batch([0, 1], 0))

    def few(tokens: list[int]) -> None:
        if len(tokens) > 1:
            raise OUT_OF_MEMORY

    model.before = few
    rig.device.launch(rig.batch([0, 1], 1))
    first, second = rig.device.take_outcomes()
    said = {slot: rig.alone(slot, 2) for slot in (0, 1)}
    assert [first.token[:, 0].tolist(), second.token[:, 0].tolist()] == [
        [said[s][step] for s in (0, 1)] for step in (0, 1)
    ]
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
    served = ServedModel(lambda spec, _: cuda_device(model), copier, info, 40, logits_processors=PROCESSORS)
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
