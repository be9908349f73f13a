"""Steps that wait for a tokenizer, joined: one row per sequence with all of its tokens. Knows nothing of streams."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.v1 import tokenizer_pb2 as tb
from quire_common.columns import i32, pack_i32

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from quire_router.core.choice import Choice


def join_rows(steps: Iterable[tb.DetokenizeRequest], choices: Mapping[int, Choice]) -> tb.DetokenizeRequest:
    """One message for many; the choices learn that fewer rows are out. Rows of those that have gone are left out."""
    tokens: dict[int, list[bytes]] = {}
    finishes: dict[int, int] = {}
    for step in steps:
        handles, counts = i32(step.handle, "handle").tolist(), i32(step.count, "count").tolist()
        at = 0
        for handle, count, finish in zip(handles, counts, step.finish or bytes(len(handles)), strict=True):
            end = at + 4 * count
            if handle in choices:
                tokens.setdefault(handle, []).append(step.token[at:end])
                finishes[handle] = finish
            at = end
    joined = [b"".join(parts) for parts in tokens.values()]
    for handle, parts in tokens.items():
        choices[handle].rows_out -= len(parts) - 1
    return tb.DetokenizeRequest(
        handle=pack_i32(list(tokens)),
        count=pack_i32([len(ids) // 4 for ids in joined]),
        token=b"".join(joined),
        finish=bytes(finishes.values()),
    )
