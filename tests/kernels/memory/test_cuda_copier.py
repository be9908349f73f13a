"""Pages between a GPU and the transfer agent's ring: whole, in the order of their tickets, beside other work."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch

from quire_common.errors import InvalidArgument
from quire_worker.cuda.cuda_copier import CudaCopier
from quire_worker.cuda.cuda_pages import CudaPages
from quire_worker.kv.page_geometry import kv_group
from quire_worker.kv_transfer.ring import Ring

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU: there is nothing to copy from")
WAIT_S = 20.0


def test_pages_go_to_the_ring_and_back() -> None:
    group = kv_group(6, 4, 128, "bfloat16", 64)
    pages = CudaPages(group, 64, 16 * group.page_bytes, torch.device("cuda"))
    pages.tensor.normal_()
    wanted = pages.tensor.clone()
    ring = Ring.create(pages.page_bytes, 4)
    copier, woken = CudaCopier(pages, ring), threading.Event()
    copier.wake = woken.set
    for slot in range(4):
        copier.to_ring(slot + 1, slot)
    stored = copier.record_event()
    assert woken.wait(WAIT_S) and copier.is_complete(stored)
    with ring.slot(2) as view:
        assert np.array_equal(np.frombuffer(view, np.uint8), wanted[3].view(torch.uint8).flatten().cpu().numpy())
    for slot in range(4):
        copier.to_page(slot + 9, slot)
    loaded = copier.record_event()
    copier.drain()
    assert loaded > stored and copier.is_complete(loaded)
    assert torch.equal(pages.tensor[9:13], wanted[1:5]) and torch.equal(pages.tensor[1:9], wanted[1:9])
    with pytest.raises(InvalidArgument, match="BAD_PAGE"):
        copier.to_page(0, 0)
    with pytest.raises(InvalidArgument, match="BAD_PAGE"):
        copier.to_ring(pages.num_pages, 0)
    copier.close()
    ring.close()
