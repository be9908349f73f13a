"""Fresh prompts on two streams: whatever becomes of them, the first waits for the second. Streams are stood in for."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor

from quire_worker.ops.interface import HeadShape
from quire_worker.ops.triton import fresh_attention
from quire_worker.ops.triton.fresh_attention import Fresh


class _Stream:
    def __init__(self) -> None:
        self.waited_for: list[_Stream] = []

    def wait_stream(self, other: _Stream) -> None:
        self.waited_for.append(other)


class _Rows:
    is_cuda = True


@pytest.mark.parametrize("fails", [False, True])
def test_nothing_is_left_under_way(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step whose launch failed is run again, a sequence at a time, in the same memory."""
    here, beside, used = _Stream(), _Stream(), list[Any]()

    def attended(_query: Tensor, _qkv: Tensor, chunk: Fresh, _shape: HeadShape) -> None:
        if fails and chunk.row:
            raise torch.OutOfMemoryError("no room")

    def on(stream: _Stream) -> contextlib.AbstractContextManager[None]:
        used.append(stream)
        return contextlib.nullcontext()

    monkeypatch.setattr(torch.cuda, "current_stream", lambda: here)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(fresh_attention, "_second_stream", lambda: beside)
    monkeypatch.setattr(fresh_attention, "_attended", attended)
    rows: Any = _Rows()
    with pytest.raises(torch.OutOfMemoryError) if fails else contextlib.nullcontext():
        fresh_attention.fresh_attention(
            rows, rows, (Fresh(0, 2048), Fresh(2048, 2048)), HeadShape(2, 1, 16, 1.0), lambda *_: None
        )
    assert used == [here, beside] and beside.waited_for == [here] and here.waited_for == [beside]
