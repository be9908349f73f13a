"""Fresh prompts on several streams: whatever becomes of them, the first waits for all. Streams are stood in for."""

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
@pytest.mark.parametrize("chunks", [2, 4, 6])
def test_nothing_is_left_under_way(chunks: int, fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step whose launch failed is run again, a sequence at a time, in the same memory."""
    here, others, used = _Stream(), [_Stream(), _Stream(), _Stream()], list[Any]()
    fresh = tuple(Fresh(2048 * index, 2048) for index in range(chunks))

    def attended(_query: Tensor, _qkv: Tensor, chunk: Fresh, _shape: HeadShape) -> None:
        if fails and chunk == fresh[-1]:
            raise torch.OutOfMemoryError("no room")

    def on(stream: _Stream) -> contextlib.AbstractContextManager[None]:
        used.append(stream)
        return contextlib.nullcontext()

    monkeypatch.setattr(torch.cuda, "current_stream", lambda: here)
    monkeypatch.setattr(torch.cuda, "stream", on)
    monkeypatch.setattr(fresh_attention, "_more_streams", lambda: others)
    monkeypatch.setattr(fresh_attention, "_attended", attended)
    rows: Any = _Rows()
    with pytest.raises(torch.OutOfMemoryError) if fails else contextlib.nullcontext():
        fresh_attention.fresh_attention(rows, rows, fresh, HeadShape(2, 1, 16, 1.0), lambda *_: None)
    beside = others[: chunks - 1]
    assert used == [here, *beside, here, others[0]][:chunks]
    assert here.waited_for == beside and all(stream.waited_for == [here] for stream in beside)
    assert not any(stream.waited_for for stream in others[len(beside) :])
