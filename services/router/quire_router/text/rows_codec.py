"""Packs rows of engine steps into messages to a tokenizer. Rows that wait are joined, and long rows are cut. This
module knows no streams.

The tokenizer answers each row once. So functions that cut or join rows return how many rows more, or fewer, each
sequence has now.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.v1 import tokenizer_pb2 as tb
from quire_common.columns import i32, pack_i32

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator

# The most bytes of tokens in one message. A tokenizer decodes these tokens within some 20 ms.
MESSAGE_BYTES = 32 * 1024

_Row = tuple[int, bytes, int]
# By handle: how many rows more a sequence has now. A negative number means that rows were joined.
MoreRows = dict[int, int]


def join_rows(
    steps: Iterable[tb.DetokenizeRequest], wanted: Container[int]
) -> tuple[list[tb.DetokenizeRequest], MoreRows]:
    """Join the rows of several steps to one row per sequence, in as few messages as possible; a row that does not fit
    into its message is cut again. Rows whose handles are not in `wanted` are left out. Returns the messages, and by
    handle how many rows more (or fewer) each sequence has now."""
    tokens: dict[int, list[bytes]] = {}
    finishes: dict[int, int] = {}
    for step in steps:
        for handle, ids, finish in rows_of(step):
            if handle in wanted:
                tokens.setdefault(handle, []).append(ids)
                finishes[handle] = finish
    messages, more = cut_rows((handle, b"".join(parts), finishes[handle]) for handle, parts in tokens.items())
    for handle, parts in tokens.items():
        more[handle] = more.get(handle, 0) + 1 - len(parts)
    return messages, more


def cut_rows(rows: Iterable[_Row]) -> tuple[list[tb.DetokenizeRequest], MoreRows]:
    """Pack rows (handle, int32 token ids, finish) into messages with at most 32 KiB of tokens each. A row that does not
    fit is cut into several rows; only the last has the finish. Returns the messages, and by handle how many rows more
    each cut sequence has now."""
    messages: list[tb.DetokenizeRequest] = []
    more: MoreRows = {}
    taken: list[_Row] = []
    size = 0
    for handle, ids, finish in rows:
        start = 0
        while size + len(ids) - start > MESSAGE_BYTES:
            room = MESSAGE_BYTES - size
            if room:
                taken.append((handle, ids[start : start + room], 0))
                start += room
                more[handle] = more.get(handle, 0) + 1
            messages.append(_message(taken))
            taken, size = [], 0
        taken.append((handle, ids[start:], finish))
        size += len(ids) - start
    if taken:
        messages.append(_message(taken))
    return messages, more


def rows_of(step: tb.DetokenizeRequest) -> Iterator[_Row]:
    """Yield (handle, token ids as int32 bytes, finish) of each row; finish is 0 if the step has no finish column."""
    handles, counts = i32(step.handle, "handle").tolist(), i32(step.count, "count").tolist()
    at = 0
    for handle, count, finish in zip(handles, counts, step.finish or bytes(len(handles)), strict=True):
        yield handle, step.token[at : at + 4 * count], finish
        at += 4 * count


def without(step: tb.DetokenizeRequest, handles: Container[int]) -> tb.DetokenizeRequest:
    """Return the step without the rows of these handles; the step itself if it has none of them."""
    if not any(handle in handles for handle in i32(step.handle, "handle").tolist()):
        return step
    return _message([row for row in rows_of(step) if row[0] not in handles])


def _message(rows: list[_Row]) -> tb.DetokenizeRequest:
    """Pack rows (handle, token ids as int32 bytes, finish) into the columns of one message."""
    return tb.DetokenizeRequest(
        handle=pack_i32([handle for handle, _, _ in rows]),
        count=pack_i32([len(ids) // 4 for _, ids, _ in rows]),
        token=b"".join(ids for _, ids, _ in rows),
        finish=bytes(finish for _, _, finish in rows),
    )
