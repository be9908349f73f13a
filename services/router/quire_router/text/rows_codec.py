"""Rows of engine steps as messages to a tokenizer: joined where they wait, cut where they are long. Knows no streams.

Each row is answered once, so what cuts or joins rows says by how many more, or fewer, each sequence has now.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.v1 import tokenizer_pb2 as tb
from quire_common.columns import i32, pack_i32

if TYPE_CHECKING:
    from collections.abc import Container, Iterable, Iterator

# Most tokens of one message: a tokenizer decodes them within some 20 ms.
MESSAGE_BYTES = 32 * 1024

_Row = tuple[int, bytes, int]
# By handle; below 0: rows were joined.
MoreRows = dict[int, int]


def join_rows(
    steps: Iterable[tb.DetokenizeRequest], wanted: Container[int]
) -> tuple[list[tb.DetokenizeRequest], MoreRows]:
    """Join the rows of steps to one row per sequence, in as few messages as possible; rows of handles not in `wanted`
    are left out. Returns the messages, and how many more (or fewer) rows each sequence has now."""
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
    """Pack rows into messages of at most MESSAGE_BYTES of tokens; a longer row becomes several. Returns the messages,
    and how many more rows each sequence has now."""
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
    """Yield (handle, int32 tokens, finish) of each row."""
    handles, counts = i32(step.handle, "handle").tolist(), i32(step.count, "count").tolist()
    at = 0
    for handle, count, finish in zip(handles, counts, step.finish or bytes(len(handles)), strict=True):
        yield handle, step.token[at : at + 4 * count], finish
        at += 4 * count


def without(step: tb.DetokenizeRequest, handles: Container[int]) -> tb.DetokenizeRequest:
    """Return the step without the rows of these handles."""
    if not any(handle in handles for handle in i32(step.handle, "handle").tolist()):
        return step
    return _message([row for row in rows_of(step) if row[0] not in handles])


def _message(rows: list[_Row]) -> tb.DetokenizeRequest:
    """Pack rows into one message."""
    return tb.DetokenizeRequest(
        handle=pack_i32([handle for handle, _, _ in rows]),
        count=pack_i32([len(ids) // 4 for _, ids, _ in rows]),
        token=b"".join(ids for _, ids, _ in rows),
        finish=bytes(finish for _, _, finish in rows),
    )
