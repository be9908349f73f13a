"""CudaCopier raises DEVICE_HUNG for copies that do not end. A fake stream stands for CUDA's, so no GPU is needed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quire_common.errors import Internal
from quire_worker.cuda import cuda_copier as cuda_copier_module
from quire_worker.cuda.cuda_copier import CudaCopier
from quire_worker.kv_transfer.ring import Ring
from tests.kernels.steps.launch_rig import NoStream, without_streams

LIMIT_S = 0.2


class Stream(NoStream):
    """A stream whose copies have not ended while `hangs`."""

    def __init__(self) -> None:
        self.hangs = False

    def synchronize(self) -> None:
        raise AssertionError("a wait without a limit")

    def query(self) -> bool:
        return not self.hangs


@pytest.fixture
def stream(monkeypatch: pytest.MonkeyPatch) -> Stream:
    made = Stream()
    without_streams(monkeypatch)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: made)
    driver = SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda _: 0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(cuda_copier_module, "CLOSE_LIMIT_S", LIMIT_S)
    return made


@pytest.fixture
def copier(stream: Stream) -> Iterator[CudaCopier]:
    ring = Ring.create(4096, 2)
    pages: Any = SimpleNamespace(page_bytes=4096)
    made = CudaCopier(pages, ring, step_timeout_s=LIMIT_S)
    yield made
    stream.hangs = False
    made.close()
    ring.close()


def test_drain_and_close_raise_device_hung_if_copies_hang(copier: CudaCopier, stream: Stream) -> None:
    stream.hangs = True
    ticket = copier.record_event()
    for wait in (copier.drain, copier.close):
        began_s = time.monotonic()
        with pytest.raises(Internal) as caught:
            wait()
        assert caught.value.code == "DEVICE_HUNG" and caught.value.fix
        assert LIMIT_S <= time.monotonic() - began_s < 10 * LIMIT_S
    stream.hangs = False
    copier.drain()
    assert copier.is_complete(ticket)


def test_record_event_without_an_event_raises_device_hung_if_copies_hang(
    copier: CudaCopier, stream: Stream, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise RuntimeError("CUDA error: out of memory")

    monkeypatch.setattr(torch.cuda, "Event", refuse)
    assert copier.is_complete(copier.record_event())
    stream.hangs = True
    with pytest.raises(Internal, match="did not finish"):
        copier.record_event()
