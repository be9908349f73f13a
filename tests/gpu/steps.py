"""Stage 1: whole steps of every padded size that a worker of default settings has, against float32 references.

Decoding, prefill and mixed, with filters and with controls, as graphs and kernel by kernel: one reference for both. A
few larger steps beside, which no size pads, and steps with fresh prompts, which are captured in pieces. NaN in every
page and place that is not a sequence's own, and in memory that kernels have not written yet.
"""

from __future__ import annotations

import contextlib
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from bench.gpu.record import Recorder
from quire_worker.config import CUDA_SEQUENCES
from quire_worker.cuda.load import step_tokens
from quire_worker.cuda.step_size import MOST_PADDED_ROWS, StepSize, fine_sizes, graph_sizes, pieced_sizes
from quire_worker.ops.triton.fresh_attention import PIECE
from tests.gpu.check_model import CheckModel
from tests.gpu.step_check import StepCheck

_MASKED, _FINE = 60, 40
_PAGES, _TINY_PAGES = 2560, 64
_STEP, _LARGE_STEP = step_tokens(16 << 30), step_tokens(1 << 30)
"""Most prefill tokens of a step of a large model and of a small one, unless somebody says."""


def run(recorder: Recorder, *, tiny: bool) -> None:
    """All of it; `tiny`: a few sizes."""
    on_gpu = torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as folder, poisoned_memory():
        model = CheckModel(Path(folder), _TINY_PAGES if tiny else _PAGES)
        if tiny:
            with StepCheck(recorder, model, 3, 64, graphs=on_gpu) as check:
                check(tiny_sizes(), "steps of a few sizes")
            return
        for samples in (_Samples(_STEP, 10, 4, 8), _Samples(_LARGE_STEP, 5, 3, 4)):
            with StepCheck(recorder, model, CUDA_SEQUENCES, samples.tokens, graphs=True) as check:
                if samples.tokens == _STEP:
                    for kind, sizes in padded_sizes().items():
                        check(sizes, f"steps of all padded sizes, {kind}")
                _check_samples(check, samples)


class _Samples(NamedTuple):
    """How many of each kind for steps of up to so many prefill tokens: the float32 reference takes seconds for one."""

    tokens: int
    full: int
    larger: int
    fresh: int


def _check_samples(check: StepCheck, samples: _Samples) -> None:
    tokens = samples.tokens
    full = [size for size in graph_sizes(CUDA_SEQUENCES, tokens) if size.rows > MOST_PADDED_ROWS]
    check(some(full, samples.full), f"full steps of {tokens} tokens")
    check(larger_steps(tokens)[: samples.larger], f"steps of up to {tokens} tokens that no size pads")
    pieced = some(pieced_sizes(CUDA_SEQUENCES, tokens, PIECE), samples.fresh)
    # A chunk that is fresh is padded at the step's end.
    fresh = [replace(size, rows=size.rows - PIECE) for size in pieced]
    check(fresh, f"steps of up to {tokens} tokens with fresh prompts", fresh=True)


def padded_sizes() -> dict[str, list[StepSize]]:
    """Those that steps are padded to, whatever the largest step may be, by what rows may ask; of those with masks, and
    of fine sizes, some, since their kernels are the same."""
    sizes = [size for size in graph_sizes(CUDA_SEQUENCES, _STEP) if size.rows <= MOST_PADDED_ROWS]
    masked = [replace(size, masked=True) for size in sizes]
    fine = fine_sizes(CUDA_SEQUENCES, _STEP)
    return {
        "plain": [size for size in sizes if not size.filtered],
        "with filters": [size for size in sizes if size.filtered and not size.controlled],
        "with controls": [size for size in sizes if size.controlled],
        "with masks": some(masked, _MASKED),
        "of fine sizes": some(fine, _FINE),
    }


def tiny_sizes() -> list[StepSize]:
    """A step that decodes, and one that does everything."""
    return [StepSize(3), StepSize(2, 32, 2, filtered=True, controlled=True, masked=True)]


def larger_steps(max_tokens: int) -> list[StepSize]:
    """Of numbers of rows that are nothing special, with few and many that decode."""
    rows = [max_tokens * part // 16 + 13 for part in (9, 11, 13, 14)]
    decodes = (0, 37, 511, 130)
    kinds = ((False, False), (True, False), (True, True), (False, False))
    return [StepSize(*each, 4, *kind) for each, kind in zip(zip(decodes, rows, strict=True), kinds, strict=True)]


def some(sizes: list[StepSize], count: int) -> list[StepSize]:
    """So many of them, from the first to the last."""
    return [sizes[index * (len(sizes) - 1) // (count - 1)] for index in range(count)]


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """New memory holds NaN while it lasts."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]  # torch's
    try:
        with warnings.catch_warnings():
            # Nothing here needs to be deterministic, and torch says so at each operation that is not.
            warnings.filterwarnings("ignore", message=".*deterministic.*", category=UserWarning)
            yield
    finally:
        torch.use_deterministic_algorithms(False)
