"""Steps with grammars on the device: what rows draw that are held now and then, and an engine whose matcher is late."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quire_common.credit import Finish, Start
from quire_common.logit_controls import LogitControls
from quire_common.sequence import Sampling, Sequence, Stop
from quire_common.structured.constraint import Constraint
from quire_common.telemetry import metrics
from quire_worker.cuda.logits_states import LogitsStates
from quire_worker.cuda.masks.device_masks import DeviceMasks
from quire_worker.cuda.step_body import StepBody
from quire_worker.cuda.step_layout import StepLayout, Tiling
from quire_worker.cuda.step_size import StepSize, graph_sizes, kernel_sizes, pieced_sizes
from quire_worker.engine.engine import Engine
from quire_worker.engine.step_runner import StepRunner
from quire_worker.matcher.mask_ring import MaskRing
from quire_worker.ops.triton import fresh_attention
from quire_worker.sampling.columns import SamplingColumns
from quire_worker.sampling.logits_state import LogitsState
from quire_worker.sampling.param_rows import param_rows
from quire_worker.sampling.sampler import sample
from quire_worker.step import HELD, StepBatch
from tests.fakes.worker.engine_bench import EngineBench, a_start, small_spec
from tests.fakes.worker.local_matcher import LocalMatcher, letter_backend, masks_after
from tests.gpu.ring_row import RingRow
from tests.kernels.sampling.mask_rows import make_mask
from tests.kernels.steps.launch_rig import NEXT, VOCAB, LastTokenModel, cuda_device, interpreted_device, without_streams
from tests.kernels.steps.stepping import DEVICE, ON_GPU, SLOTS, WIDTH, WORDS, TwoModels, least_that_suits
from tests.tiers import deep_after

# The interpreter computes with numpy, which tells of exp(-inf - most) and the like.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")
CONSTRAINED, VOCABULARY = 4, 97
"""Slots with a grammar, the first ones."""
STOP = 3


class ConstrainedSteps:
    """Six sequences, four of them with grammars, in batches as an engine makes them with two steps in flight: it knows
    of a row that was held when it forms the step after the next."""

    def __init__(self, page: int, ring: MaskRing, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.page = page
        self.prompt = [self.rng.integers(0, VOCABULARY, size).astype(np.int32) for size in (3, 15, 16, 17, 9, 5)]
        self.rows = [RingRow(ring, 2 * slot + 1) for slot in range(CONSTRAINED)]
        self.next_position = [len(prompt) for prompt in self.prompt]
        """The position of the token that each row samples next."""
        self.assumed = list(self.next_position)
        self.pages = (self.rng.permutation(SLOTS * WIDTH) + 1).reshape(SLOTS, WIDTH).astype(np.int32)
        self.controls = {
            slot: LogitsState(Sequence(self.prompt[slot], Stop(200), Sampling(controls=controls)))
            for slot, controls in {
                0: LogitControls(presence_penalty=1.0, frequency_penalty=0.5),
                5: LogitControls(repetition_penalty=1.3),
            }.items()
        }

    def batch(self, *, prompts: bool, controlled: bool) -> StepBatch:
        """All six: their prompts, or their next tokens."""
        count = np.array([len(each) if prompts else 1 for each in self.prompt], np.int32)
        position = np.array([0 if prompts else at - 1 for at in self.assumed], np.int32)
        end, rng = position + count, self.rng
        min_len = np.array([0, 18, 0, 30, 11, 0], np.int32)
        stop_id = np.full((SLOTS, 1), STOP, np.int32)
        bound = np.array([5, 200, 18, 200, 11, 200], np.int32)
        blocked = {row: stop_id[row] for row in range(SLOTS) if end[row] < min_len[row]}
        return StepBatch(
            token=np.concatenate(self.prompt).astype(np.int64) if prompts else np.zeros(SLOTS, np.int64),
            count=count,
            position=position,
            page_table=self.pages[:, : -(-int(end.max()) // self.page)],
            sample=np.ones(SLOTS, np.bool_),
            blocked=blocked,
            controls=self.controls if controlled else {},
            constraints=dict(enumerate(self.rows)),
            params=param_rows(
                SLOTS,
                temperature=np.array([0.0, 1.0, 1.0, 0.0, 1.0, 0.0]),
                top_p=0.9,
                seed=rng.integers(0, 2**64, SLOTS, dtype=np.uint64),
            ),
            logprobs=np.full(SLOTS, -1, np.int32),
            slot=np.arange(SLOTS, dtype=np.int32),
            fed=np.full(SLOTS, not prompts),
            last=end >= bound,
            bound=bound,
            min_len=min_len,
            stop_id=stop_id,
        )

    def leave_masks(self, chance: float) -> None:
        """Leave the masks of the next tokens, each by chance."""
        for row, at in zip(self.rows, self.next_position, strict=False):
            if self.rng.random() < chance:
                tokens = self.rng.choice(VOCABULARY, int(self.rng.integers(1, 40)), replace=False)
                row.put(at, make_mask(VOCABULARY, *tokens.tolist(), STOP))

    def end_step(self, held: set[int]) -> None:
        """Take in what came of a step; the next batch is one for which that is not known yet."""
        for slot in range(SLOTS):
            self.assumed[slot] = self.next_position[slot] + 1
            if slot not in held:
                self.next_position[slot] += 1


# The interpreter takes seconds for a step.
@pytest.mark.parametrize(("even", "controlled"), deep_after(1, [(False, True), (True, True), (False, False)]))
def test_steps_with_held_rows_come_to_what_the_cpu_says(
    even: bool, controlled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    models = TwoModels(tmp_path / "model", "qwen3", even=even)
    monkeypatch.setattr(fresh_attention, "PIECE", 8)
    vocab = models.cpu.spec.vocab_size
    assert vocab == VOCABULARY
    ring = MaskRing.create(16, 2, vocab)
    masks = DeviceMasks(ring, DEVICE, SLOTS, 2 * SLOTS)
    body = StepBody(models.decoder, models.pages.clone(), WORDS, SLOTS, 2 * SLOTS, masks)
    reference, states = StepRunner(models.cpu.runner), LogitsStates(DEVICE, vocab)
    steps = ConstrainedSteps(models.page_size, ring, 11)
    held_rows, late, ends = 0, 0, 0
    for turn in range(30 if ON_GPU else 5):
        steps.leave_masks(0.5)
        batch = steps.batch(prompts=turn == 0, controlled=controlled)
        late += sum(a < b for a, b in zip(steps.next_position, steps.assumed, strict=True)) if turn else 0
        decodes, chunks = (0, SLOTS) if turn == 0 else (SLOTS, 0)
        size = StepSize(decodes + 2, len(batch.token) + 5 if chunks else 0, chunks, True, controlled, True)
        layout = StepLayout.of(size, Tiling.of(models.shape, DEVICE, even=even))
        host = np.full(WORDS, 12345, np.int32)
        used = layout.pack(batch, host, states.addresses(batch))
        body.uploaded[:used].copy_(torch.from_numpy(host[:used]))
        body.launch(layout)
        wanted = reference.run(dataclasses.replace(batch, token=batch.token.copy()))
        places = np.arange(SLOTS) + (2 if chunks else 0)
        token = body.results[: size.sequences].cpu().numpy()[places]
        finish = body.results[size.sequences : 2 * size.sequences].cpu().numpy()[places]
        held = set(wanted.held)
        assert set(np.flatnonzero(token == HELD).tolist()) == held
        free = [row for row in range(SLOTS) if row not in held]
        assert token[free].tolist() == wanted.token[free, 0].tolist()
        assert finish.tolist() == wanted.finish.tolist()
        held_rows, ends = held_rows + len(held), ends + int((finish > 0).sum())
        steps.end_step(held)
    assert held_rows > 3 and late > 3 and ends > 0


def test_masks_are_awaited_though_the_head_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A capture cannot end before the branch that reads masks has joined, and a step must not be launched again."""
    models = TwoModels(tmp_path / "model", "qwen3", even=False)
    ring = MaskRing.create(16, 2, models.cpu.spec.vocab_size)
    masks = DeviceMasks(ring, DEVICE, SLOTS, 2 * SLOTS)
    body = StepBody(models.decoder, models.pages.clone(), WORDS, SLOTS, 2 * SLOTS, masks)
    calls: list[str] = []
    monkeypatch.setattr(masks, "fetch", lambda *_: calls.append("fetch"))
    monkeypatch.setattr(masks, "await_fetch", lambda: calls.append("await"))
    monkeypatch.setattr(models.decoder, "forward", lambda token, *_: torch.zeros(len(token), 4, device=DEVICE))
    monkeypatch.setattr(models.decoder, "logits", lambda _: calls.pop(9))
    layout = StepLayout.of(StepSize(2, 0, 0, False, False, True), Tiling.of(models.shape, DEVICE, even=False))
    layout.pack_nobody(body.uploaded)
    with pytest.raises(IndexError):
        body.launch(layout)
    assert calls == ["fetch", "await"]


EOS = (1, 2)
BACKEND = letter_backend(VOCAB, EOS)
TEXT = "start: /[A-V]{4,6}(0[3-9]*)?/"
SPEC = small_spec(vocab_size=VOCAB, eos_token_ids=EOS, max_num_seqs=8, page_size=16, num_pages=64)


class MaskedBench(EngineBench):
    """An EngineBench on a GPU's device over the CPU, with a matcher."""

    def __init__(self, matcher: LocalMatcher, device: Any, depth: int) -> None:
        self.matcher = matcher
        super().__init__(SPEC, depth=depth)
        self.device = device(LastTokenModel(), matcher.ring)
        self.engine = Engine(SPEC, self.device, depth=depth, matcher=matcher.client)

    def settle(self) -> None:
        """One round, and the end of all steps in flight."""
        while self.engine.launch():
            pass
        while self.engine.in_flight:
            report = self.engine.collect()
            if report is not None:
                self.told.add(report)
        while (report := self.engine.collect()) is not None:
            self.told.add(report)
        self.engine.check_integrity()

    def serve(self, most: int = 400) -> None:
        """To the end of all."""
        for _ in range(most):
            self.settle()
            if not self.engine.residents.table.started():
                return
        raise AssertionError("still busy")


@pytest.fixture(params=[cuda_device, pytest.param(interpreted_device, marks=pytest.mark.deep)])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    if ON_GPU:
        pytest.skip("streams are stood in for")
    without_streams(monkeypatch)
    made = []

    def make(model: LastTokenModel, ring: MaskRing) -> Any:
        made.append(request.param(model, masks=ring))
        return made[-1]

    yield make
    for each in made:
        each.close()


def start(slot: int, *, text: str = TEXT, min_tokens: int = 0, controls: LogitControls | None = None) -> Start:
    sampling = Sampling(temperature=1.0 if slot % 2 else 0.0, seed=slot, controls=controls)
    pages = list(range(1 + 4 * slot, 5 + 4 * slot))
    made = a_start(slot, [5 + slot, 7], pages, max_tokens=9, min_tokens=min_tokens, sampling=sampling)
    constraint = Constraint.of(text) if text else None
    return dataclasses.replace(made, sequence=dataclasses.replace(made.sequence, constraint=constraint))


def alone(made: Start) -> tuple[list[int], Finish]:
    """The answer and the finish reason of a sequence that runs alone."""
    sequence = made.sequence
    grammar = masks_after(BACKEND, sequence.constraint.text) if sequence.constraint else None
    token, said, controls = int(sequence.prompt_ids[-1]), list[int](), LogitsState.of(sequence)
    while len(said) < sequence.stop.max_tokens:
        params = param_rows(1, temperature=sequence.sampling.temperature, seed=np.uint64(sequence.sampling.seed or 0))
        columns = SamplingColumns(params, np.array([len(sequence.prompt_ids) + len(said)], np.int64))
        columns.masks = {} if grammar is None else {0: grammar(said)}
        columns.controls = {} if controls is None else {0: controls}
        columns.blocked = {0: np.array(EOS, np.int32)} if len(said) < sequence.stop.min_tokens else {}
        token = int(sample(torch.from_numpy(NEXT[token][None].copy()), columns)[0])
        said.append(token)
        if token in EOS:
            return said, Finish.STOP
        if controls is not None:
            controls.fed(token)
    return said, Finish.LENGTH


def held_so_far() -> float:
    return metrics.registry.get_sample_value("quire_worker_held_rows_total") or 0.0


@pytest.mark.parametrize("depth", deep_after(1, [2, 1]))
def test_engine_with_a_late_matcher_gives_the_same_answers(device: Any, depth: int) -> None:
    """Rows with grammars, some with penalties or min_tokens, beside rows without; the matcher hears frames now and
    then, and is lost twice."""
    matcher = LocalMatcher(BACKEND, VOCAB, prompt=False)
    bench = MaskedBench(matcher, device, depth)
    rng = np.random.default_rng(4)
    penalties = LogitControls(frequency_penalty=1.0, presence_penalty=0.5)
    starts = [
        start(0, min_tokens=6),
        start(1, controls=penalties),
        start(2, text="", controls=penalties),
        start(3),
    ]
    before = held_so_far()
    bench.grant(*starts)
    for turn in range(300):
        bench.settle()
        if turn in (5, 8):
            matcher.link.lose()
        for _ in range(int(rng.integers(0, 4))):
            matcher.link.hear()
        if not bench.engine.residents.table.started():
            break
    told = bench.told
    assert not told.errors
    for slot, made in enumerate(starts):
        assert (told.tokens[slot], told.finish[slot]) == alone(made), slot
        letters = "".join(chr(48 + token) for token in told.tokens[slot] if token not in EOS)
        assert not made.sequence.constraint or letters[:4].isalpha()
    assert held_so_far() - before > 3


def test_bad_grammar_ends_its_row_alone(device: Any) -> None:
    matcher = LocalMatcher(BACKEND, VOCAB)
    bench = MaskedBench(matcher, device, 2)
    good = start(1)
    bench.grant(start(0, text="start: nonsense"), good)
    bench.serve()
    assert bench.told.codes() == [(0, "GRAMMAR_FAILED")] and bench.told.tokens[1] == alone(good)[0]


def test_sizes_with_masks_are_there_only_for_devices_that_have_some() -> None:
    plain, sizes = graph_sizes(64, 2048), graph_sizes(64, 2048, masked=True)
    assert sizes[: len(plain)] == plain and not any(size.masked for size in plain)
    assert [dataclasses.replace(size, masked=False) for size in sizes[len(plain) :]] == plain
    assert least_that_suits(sizes, StepSize(5)) == StepSize(8)
    assert least_that_suits(sizes, StepSize(5, masked=True)) == StepSize(8, masked=True)
    assert least_that_suits(sizes, StepSize(5, 0, 0, False, True, True)) == StepSize(8, 0, 0, True, True, True)
    assert least_that_suits(plain, StepSize(5, masked=True)) is None
    in_advance = [size for size in sizes if size.masked and size.in_advance]
    assert StepSize(64, masked=True) in in_advance and StepSize(64, filtered=True, masked=True) in in_advance
    assert not any(size.rows or size.controlled for size in in_advance)
    assert sum(size.masked for size in kernel_sizes(64, 2048, 8, masked=True)) == 3
    assert not any(size.masked for size in pieced_sizes(64, 8192, 512))
    assert any(size.masked for size in pieced_sizes(64, 8192, 512, masked=True))
