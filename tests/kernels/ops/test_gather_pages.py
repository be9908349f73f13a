"""Pages from one pool into another in one launch: the right ones, whole, and no other byte."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from bench.harness.plain_pages import ids
from quire_worker.ops.triton.gather_pages import GatherShape, compile_gather, gather_pages

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def pool(pages: int, page_bytes: int, seed: int) -> torch.Tensor:
    data = np.random.default_rng(seed).integers(0, 256, (pages, page_bytes), dtype=np.uint8)
    return torch.from_numpy(data).to(DEVICE)


@pytest.mark.parametrize("programs", [1, 3, 64])
@pytest.mark.parametrize("page_bytes", [256, 1024 + 48, 8192])
def test_pages_come_whole_and_touch_nothing_else(page_bytes: int, programs: int) -> None:
    theirs, ours = pool(9, page_bytes, 1), pool(7, page_bytes, 2)
    wanted = ours.clone()
    source, target = ids(8, 1, 5, 3), ids(2, 6, 1, 3)
    for taken, given in zip(source.tolist(), target.tolist(), strict=True):
        wanted[given] = theirs[taken]
    gather_pages(theirs.data_ptr(), ours, source, target, GatherShape(programs, block=128, warps=4))
    assert torch.equal(ours, wanted)


def test_no_pages_change_nothing() -> None:
    ours = pool(2, 256, 0)
    wanted = ours.clone()
    gather_pages(ours.data_ptr(), ours, ids(), ids())
    compile_gather(ours)
    assert torch.equal(ours, wanted)


def test_pages_that_words_do_not_fit_are_refused() -> None:
    ours = pool(2, 256, 0)
    with pytest.raises(ValueError, match="not aligned"):
        gather_pages(ours.data_ptr() + 4, ours, ids(1), ids(0))
    with pytest.raises(ValueError, match="not aligned"):
        gather_pages(ours.data_ptr(), pool(2, 260, 0), ids(1), ids(0))
