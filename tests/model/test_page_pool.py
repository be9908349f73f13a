from __future__ import annotations

import numpy as np
import pytest
import torch

from quire_common.errors import ConfigError, InvalidArgument
from quire_worker.kv.page_geometry import kv_group
from quire_worker.kv.page_pool import PagePool, pages_to_zero

GROUP = kv_group(layers=3, kv_heads=2, head_dim=4, dtype="float32", page_size=16)


def test_a_page_is_one_run_of_bytes_in_the_designs_order() -> None:
    pool = PagePool(GROUP, 16, 5)
    pool.tensor[3] = torch.arange(2 * 3 * 2 * 16 * 4).view(2, 3, 2, 16, 4)
    page = np.frombuffer(pool.read_page(3), np.float32)
    assert page.nbytes == pool.page_bytes == GROUP.page_bytes == 2 * 3 * 2 * 16 * 4 * 4
    assert np.array_equal(page, np.arange(page.size))


def test_reads_are_live_and_cannot_write() -> None:
    pool = PagePool(GROUP, 16, 3)
    view = pool.read_page(1)
    pool.tensor[1] = 7.0
    assert np.frombuffer(view, np.float32)[0] == 7.0
    with pytest.raises(TypeError):
        view[0] = 1


def test_a_page_survives_a_move_between_pools() -> None:
    source, target = PagePool(GROUP, 16, 3), PagePool(GROUP, 16, 4)
    source.tensor[2].normal_()
    target.write_page(3, bytes(source.read_page(2)))
    assert torch.equal(target.tensor[3], source.tensor[2])
    assert not target.tensor[:3].any()
    target.copy_page(3, 1)
    assert torch.equal(target.tensor[1], source.tensor[2])


@pytest.mark.parametrize(("page", "size"), [(0, 0), (1, -1), (1, 1), (9, 0), (-1, 0)])
def test_bad_writes_are_refused(page: int, size: int) -> None:
    pool = PagePool(GROUP, 16, 3)
    with pytest.raises(InvalidArgument) as error:
        pool.write_page(page, bytes(pool.page_bytes + size))
    assert error.value.code == "BAD_PAGE"


@pytest.mark.parametrize("page", [-1, 3])
def test_bad_reads_are_refused(page: int) -> None:
    with pytest.raises(InvalidArgument):
        PagePool(GROUP, 16, 3).read_page(page)


def test_capacity_comes_from_bytes() -> None:
    assert PagePool.of_bytes(GROUP, 16, 7 * GROUP.page_bytes + 5).num_pages == 7
    with pytest.raises(ConfigError) as error:
        PagePool.of_bytes(GROUP, 16, 2 * GROUP.page_bytes - 1)
    assert error.value.code == "KV_CACHE_TOO_SMALL"


def test_pages_that_a_step_enters_and_does_not_fill_are_zeroed() -> None:
    table = np.array([[5, 6, 7], [8, 9, 10], [11, 12, 13], [14, 15, 16], [17, 18, 19]], np.int32)
    position = np.array([0, 3, 16, 10, 31], np.int32)
    count = np.array([16, 2, 1, 30, 1], np.int32)
    # Filled whole; begun before; entered; entered by a chunk's tail; begun before.
    assert pages_to_zero(position, count, table, 16).tolist() == [12, 16]
