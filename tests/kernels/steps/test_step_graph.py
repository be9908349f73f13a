"""Captured steps do what the eager twin does, whole or in pieces; the sizes that are captured in pieces.

Without a GPU a stand-in replays what was launched while a step of padding was "captured".
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from quire_worker.cuda.graphs import step_graph_cache
from quire_worker.cuda.graphs.graph_cache import GraphCache
from quire_worker.cuda.graphs.graph_recorder import GraphRecorder, Recorder, borrowed
from quire_worker.cuda.graphs.step_graph import StepGraph
from quire_worker.cuda.graphs.step_graph_cache import StepGraphCache
from quire_worker.cuda.logits_states import LogitsStates
from quire_worker.cuda.step_body import StepBody
from quire_worker.cuda.step_layout import StepLayout, Tiling
from quire_worker.cuda.step_size import StepSize, pieced_sizes
from quire_worker.ops.interface import HeadShape
from quire_worker.ops.triton import fresh_attention, triton_ops
from quire_worker.ops.triton.fresh_attention import Fresh
from quire_worker.step import StepBatch
from tests.kernels.steps.launch_rig import without_streams
from tests.kernels.steps.stepping import DEVICE, ON_GPU, WORDS, Sequences, TwoModels, least_that_suits
from tests.tiers import deep_after

# The interpreter computes with numpy, which tells of exp(-inf - most) and the like.
pytestmark = pytest.mark.filterwarnings("ignore:.*encountered in.*:RuntimeWarning")


@pytest.fixture
def recorder() -> Iterator[Recorder]:
    if ON_GPU:
        with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]  # torch's
            yield GraphRecorder()
        return
    from tests.fakes.worker.replayed_launches import ReplayedLaunches

    stand_in = ReplayedLaunches()
    yield stand_in
    stand_in.restore()


def pack(body: StepBody, layout: StepLayout, batch: StepBatch, states: LogitsStates) -> None:
    host = np.full(WORDS, 12345, np.int32)
    used = layout.pack(batch, host, states.addresses(batch))
    body.uploaded[:used].copy_(torch.from_numpy(host[:used]))


def size_of_all(batches: list[StepBatch]) -> StepSize:
    """With a place more than any batch needs, and for fresh chunks' padding."""
    decodes = [int(batch.fed.sum()) for batch in batches]
    rows = max(len(batch.token) - each for batch, each in zip(batches, decodes, strict=True))
    chunks = max(len(batch.count) - each for batch, each in zip(batches, decodes, strict=True))
    return StepSize(max(decodes) + 1, rows + fresh_attention.PIECE, chunks + 1, filtered=True, controlled=True)


def fresh_of(batch: StepBatch, decodes: int) -> tuple[Fresh, ...]:
    first = np.cumsum(batch.count) - batch.count - decodes
    chosen = np.flatnonzero((batch.position == 0) & (batch.count > 3))
    return tuple(Fresh(int(first[each]), int(batch.count[each])) for each in chosen)


# The interpreter takes seconds for a step.
@pytest.mark.parametrize(
    ("pieced", "post_norm", "gated"),
    deep_after(1, [(False, False, False), (True, False, False), (True, True, False), (True, False, True)]),
)
def test_a_captured_step_is_the_eager_one(
    pieced: bool, post_norm: bool, gated: bool, recorder: Recorder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What ends a block goes through a norm, or is added to the residual at once.
    models = TwoModels(tmp_path / "model", "qwen3", post_norm=post_norm, output_gate=gated)
    vocab = models.cpu.spec.vocab_size
    monkeypatch.setattr(fresh_attention, "PIECE", 8)
    # Four rows a program, as in large steps: a quarter of the programs.
    monkeypatch.setattr(triton_ops, "_MANY_ROWS", 1)
    sequences = Sequences(6, vocab, models.page_size)
    batches = [sequences.batch() for _ in range(12 if ON_GPU else 3)][1:]
    eager, captured = models.body(), models.body()
    # Few shares of keys: each is a program to the interpreter.
    layout = StepLayout.of(size_of_all(batches), Tiling.of(models.shape, DEVICE)._replace(programs=2), fresh=pieced)
    graph = StepGraph(captured, layout, recorder)
    assert not captured.last_token.any()
    captured.pages.copy_(eager.pages)
    states = LogitsStates(DEVICE, vocab), LogitsStates(DEVICE, vocab)
    kinds = set()
    for batch in batches if pieced else batches[:1]:
        decodes = int(batch.fed.sum())
        chunks = len(batch.count) - decodes
        fresh = fresh_of(batch, decodes) if pieced else ()
        kinds.add((len(fresh) > 0, chunks > len(fresh)))
        used = graph.layout_of(fresh, chunks)
        assert (used.fresh is None) == (not pieced) and len(used.fresh or ()) == len(fresh)
        pack(eager, used, batch, states[0])
        pack(captured, used, batch, states[1])
        eager.launch(used)
        graph.replay(used)
        assert torch.equal(captured.results, eager.results)
        assert torch.equal(captured.last_token, eager.last_token)
        # A product of some of the rows may sum in another order than one of all.
        torch.testing.assert_close(captured.pages, eager.pages, rtol=2e-5, atol=2e-6 if pieced else 0.0, equal_nan=True)
    # Fresh chunks alone, and beside one with tiles.
    assert kinds >= ({(True, False), (True, True)} if pieced else {(False, True)})


def test_a_borrowed_tensor_is_the_same_place() -> None:
    x = torch.arange(12, dtype=torch.bfloat16, device=DEVICE).view(3, 4)
    same = borrowed(x)
    same[1, 2] = 99
    assert x[1, 2] == 99 and same.shape == x.shape and same.dtype == x.dtype and same.data_ptr() == x.data_ptr()


@pytest.mark.skipif(not ON_GPU, reason="there is no GPU whose memory it could be")
def test_growing_graphs_stay_in_the_memory_that_was_kept_for_them() -> None:
    with torch.cuda.stream(torch.cuda.Stream()):  # type: ignore[no-untyped-call]  # torch's
        recorder = GraphRecorder(64 << 20)
        kept, graphs = torch.cuda.memory_reserved(), []
        for mib in range(20, 60, 4):
            recorder.begin()
            torch.empty(mib << 20, dtype=torch.uint8, device=DEVICE)[:1].zero_()
            graphs.append(recorder.end())
        assert torch.cuda.memory_reserved() == kept


class _StandInGraph:
    """A CUDA graph that captures nothing."""

    def capture_begin(self, **_options: object) -> None:
        pass

    def capture_end(self) -> None:
        pass


class _Cycle:
    """An object that only the garbage collector frees, as engines and their graphs are."""

    def __init__(self) -> None:
        self.itself = self


@pytest.mark.parametrize("end", ["end", "abandon"])
def test_the_garbage_collector_frees_nothing_during_a_capture(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if not ON_GPU:
        monkeypatch.setattr(torch.cuda, "CUDAGraph", _StandInGraph)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    recorder, captured = GraphRecorder(), torch.zeros(1, device=DEVICE)
    with torch.cuda.stream(torch.cuda.Stream()) if ON_GPU else torch.no_grad():  # type: ignore[no-untyped-call]  # torch's
        recorder.begin()
        captured.add_(1)  # torch warns of a graph that is empty
        freed = weakref.ref(_Cycle())
        kept: list[list[int]] = [[] for _ in range(200_000)]  # enough new containers for many collections
        assert freed() is not None
        getattr(recorder, end)()
    assert gc.isenabled()
    kept += [[] for _ in range(200_000)]
    assert freed() is None


@pytest.mark.parametrize("failures", [0, 1, 2])
def test_a_capture_without_room_is_tried_again_with_what_the_allocator_kept(
    failures: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries, emptied = [], []

    def graph(_body: object, layout: StepLayout, recorder: object) -> object:
        tries.append(layout.size)
        if len(tries) <= failures:
            raise torch.OutOfMemoryError("no room")
        return recorder

    without_streams(monkeypatch)
    monkeypatch.setattr(step_graph_cache, "GraphRecorder", lambda reserve: reserve)
    monkeypatch.setattr(step_graph_cache, "StepGraph", graph)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: emptied.append(len(tries)))
    tiling = Tiling.of(HeadShape(4, 2, 16, 0.25), torch.device("cpu"))
    body: Any = SimpleNamespace(masks=None)  # nothing runs
    cache = StepGraphCache(body, tiling, None, 4, 64, 1234, fresh=False)  # type: ignore[arg-type]  # nor on a stream
    if failures == 2:
        with pytest.raises(torch.OutOfMemoryError):
            cache.capture(1)
    else:
        cache.capture(1)
        assert cache.find(StepSize(1), fresh=False) == 1234  # type: ignore[comparison-overlap]  # what stands for it
    assert tries == [StepSize(1)] * (min(failures, 1) + 1) and emptied == [1] * min(failures, 1)


def test_sizes_in_pieces() -> None:
    sizes = pieced_sizes(512, 8192, 256)
    assert len(sizes) == len(set(sizes)) and not pieced_sizes(512, 4096, 256)
    assert sizes[:2] == [StepSize(0, 8448, 128, filtered=True), StepSize(0, 8192, 128, filtered=True)]
    assert [size.decodes for size in sizes[:16]] == [
        each for n in (0, 16, 64, 128, 192, 256, 384, 512) for each in (n, n)
    ]
    for decodes in range(0, 513, 37):
        # A fresh chunk at the end of a full step is padded by as much as 255 rows.
        for rows in (8192 - decodes, 8192 - decodes + 255):
            found = least_that_suits(sizes, StepSize(decodes, rows, 3))
            assert found in sizes[:16] and found.total_rows <= 1.06 * (decodes + rows)
    assert least_that_suits(sizes, StepSize(0, 5000, 2)) == StepSize(0, 5120, 128, filtered=True)
    assert least_that_suits(sizes, StepSize(0, 5000, 2, controlled=True)) == StepSize(0, 5120, 128, True, True)
    assert least_that_suits(sizes, StepSize(65, 4097, 2)) is None  # 4,480 rows for 4,162


class Maker:
    def __init__(self) -> None:
        self.made: list[int] = []

    def __call__(self, size: StepSize) -> int:
        self.made.append(size.decodes)
        return size.decodes


def test_a_shelf_makes_what_is_wanted_and_no_more_than_it_may() -> None:
    sizes = [StepSize(each) for each in (1, 2, 4, 8, 16)]
    maker = Maker()
    cache = GraphCache([], [sizes[0], sizes[3]], maker, 3, 1, at_once=sizes)
    assert cache.has_missing and cache.find(StepSize(6)) == 8 and maker.made == [8]
    cache.capture_next()
    assert maker.made == [8, 1] and not cache.has_missing
    assert cache.find(StepSize(2)) == 2 and cache.find(StepSize(2)) == 2 and maker.made == [8, 1, 2]
    # Three there are: from now on what is there must do.
    assert cache.find(StepSize(3)) == 8 and cache.find(StepSize(9)) is None and maker.made == [8, 1, 2]


def test_a_shelf_makes_at_once_what_is_wanted_again_and_again_and_the_rest_in_time() -> None:
    sizes = [StepSize(each) for each in (1, 2, 4, 8)]
    maker = Maker()
    cache = GraphCache(sizes, sizes[:1], maker, 4, 3)
    assert cache.find(StepSize(4)) is None and cache.find(StepSize(8)) is None and maker.made == []
    assert cache.find(StepSize(8)) is None
    cache.capture_next()  # what was wanted twice goes before what may never be, which goes before what was wanted once
    assert maker.made == [8] and cache.has_missing
    assert cache.find(StepSize(3)) == 8 and maker.made == [8]
    assert cache.find(StepSize(3)) == 4 and cache.find(StepSize(3)) == 4 and maker.made == [8, 4]
    cache.capture_next()
    assert maker.made == [8, 4, 1] and not cache.has_missing
    assert cache.find(StepSize(1)) == 1 and cache.find(StepSize(9)) is None


def test_a_shelf_makes_a_coarse_size_at_once_while_a_fine_one_is_put_off() -> None:
    coarse, fine = [StepSize(4), StepSize(8)], [StepSize(5), StepSize(6)]
    maker = Maker()
    cache = GraphCache(fine, [*coarse, *fine], maker, 4, 4, at_once=coarse)
    assert [cache.find(StepSize(5)) for _ in range(3)] == [8, 8, 8] and maker.made == [8]
    assert cache.find(StepSize(5)) == 5 and maker.made == [8, 5], "the fourth time it is made"
    assert cache.find(StepSize(6)) == 8 and cache.find(StepSize(3)) == 4 and maker.made == [8, 5, 4]
    cache.capture_next()
    assert cache.find(StepSize(6)) == 6 and maker.made == [8, 5, 4, 6] and not cache.has_missing


def test_a_shelf_that_gave_up_makes_do() -> None:
    sizes = [StepSize(each) for each in (1, 2, 4)]
    maker = Maker()
    cache = GraphCache([], sizes, maker, 3, 1, at_once=sizes)
    cache.capture_next()
    cache.give_up()
    assert not cache.has_missing and cache.find(StepSize(1)) == 1 and cache.find(StepSize(2)) is None
