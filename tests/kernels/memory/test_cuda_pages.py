"""The pool's pages by number: what may be written, asked for one by one and for many at once."""

from __future__ import annotations

import pytest
import torch

from bench.harness.plain_pages import ids
from quire_common.errors import InvalidArgument
from quire_worker.arrays import Int32
from quire_worker.cuda.cuda_pages import CudaPages
from quire_worker.kv.page_geometry import kv_group

GROUP = kv_group(1, 1, 8, "bfloat16", 4)


@pytest.mark.parametrize("pages", [ids(), ids(1), ids(8, 1, 3)])
def test_pages_of_the_pool_may_be_written(pages: Int32) -> None:
    CudaPages(GROUP, 4, 9 * GROUP.page_bytes, torch.device("cpu")).check_writable(pages)


@pytest.mark.parametrize("page", [0, -1, 9])
def test_one_that_may_not_is_found_among_many(page: int) -> None:
    pool = CudaPages(GROUP, 4, 9 * GROUP.page_bytes, torch.device("cpu"))
    with pytest.raises(InvalidArgument, match="BAD_PAGE"):
        pool.check_writable(ids(3, page, 5))
    with pytest.raises(InvalidArgument, match="BAD_PAGE"):
        pool.writable(page)
