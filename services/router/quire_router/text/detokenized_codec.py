"""Converts a tokenizer's DetokenizeResponse to plain values. This module knows no streams and no sequences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire_common import errors
from quire_common.columns import equal_lengths, i32, u8

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from quire.v1 import tokenizer_pb2 as tb
    from quire_common.errors import QuireError


@dataclass(slots=True)
class Detokenized:
    """The answers to some rows. `handles`, `texts`, `stops` and `used` have one value per row. `stops` has the index of
    the stop string that was found; -1: none. `used` is the number of the row's tokens that count. `cut`: the last text
    goes on in the next message. `offsets` has the number of output characters after each token that counts, for rows
    whose handles ask for offsets, which are the odd handles. `row_us` is the tokenizer's time per row, in
    microseconds."""

    handles: list[int]
    texts: Sequence[str]
    stops: list[int]
    used: list[int]
    offsets: list[int] | None
    row_us: float
    cut: bool
    failed: list[tuple[int, QuireError]]
    parts: Iterable[tuple[int, int, int, int]] = ()
    """For each part of the text of these rows or of later rows: handle, PartKind, index of the tool call, and number of
    characters."""
    reasoning_tokens: Iterable[tuple[int, int]] = ()
    """For some handles: the handle, and the number of reasoning tokens in its answer so far."""


def detokenized(message: tb.DetokenizeResponse) -> Detokenized:
    """Convert a response from the wire to columns with one value per row (handle, text, stop string, counted tokens).
    Offsets, errors, text parts and counts of reasoning tokens are lists beside them. Raises InvalidArgument for columns
    that contradict each other, but does not compare the numbers of texts and offsets with the rows."""
    handles, used = i32(message.handle, "handle"), i32(message.used, "used")
    stops = i32(message.stop_index, "stop_index")
    rows = equal_lengths("a DetokenizeResponse", handle=handles, used=used, stop_index=stops)
    answer = Detokenized(
        handles.tolist(),
        message.text,
        stops.tolist(),
        used.tolist(),
        i32(message.text_offset, "text_offset").tolist() if message.text_offset else None,
        message.elapsed_us / rows if rows else 0.0,
        message.cut,
        [(failed.handle, errors.from_message(failed.error)) for failed in message.errors] if message.errors else [],
    )
    if message.part_handle:
        columns = [i32(getattr(message, name), name) for name in ("part_handle", "part_call", "part_chars")]
        kinds = u8(message.part_kind, "part_kind")
        equal_lengths("a DetokenizeResponse", handle=columns[0], call=columns[1], chars=columns[2], kind=kinds)
        handles_of, calls, chars = (column.tolist() for column in columns)
        answer.parts = zip(handles_of, kinds.tolist(), calls, chars, strict=True)
    if message.reasoning_handle:
        owners, counts = i32(message.reasoning_handle, "reasoning_handle"), i32(message.reasoning_tokens, "tokens")
        equal_lengths("a DetokenizeResponse", reasoning_handle=owners, reasoning_tokens=counts)
        answer.reasoning_tokens = zip(owners.tolist(), counts.tolist(), strict=True)
    return answer
