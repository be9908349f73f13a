"""A tokenizer's DetokenizeResponse as plain values. Knows no streams and no sequences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from quire_common import errors
from quire_common.columns import equal_lengths, i32

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quire.v1 import tokenizer_pb2 as tb
    from quire_common.errors import QuireError


@dataclass(slots=True)
class Detokenized:
    """Answers to rows, a value per row in each list. `stops` are indices of stop strings, -1: none was found; `used`
    counts the tokens of the row that the answer keeps. `cut`: the last text goes on in the next message. `offsets` are
    characters of output after each kept token, of the rows that asked for them. `row_us`: time per row."""

    handles: list[int]
    texts: Sequence[str]
    stops: list[int]
    used: list[int]
    offsets: list[int] | None
    row_us: float
    cut: bool
    failed: list[tuple[int, QuireError]]


def detokenized(message: tb.DetokenizeResponse) -> Detokenized:
    """Convert a response from the wire. Raises InvalidArgument for columns that contradict each other."""
    handles, used = i32(message.handle, "handle"), i32(message.used, "used")
    stops = i32(message.stop_index, "stop_index")
    rows = equal_lengths("a DetokenizeResponse", handle=handles, used=used, stop_index=stops)
    return Detokenized(
        handles.tolist(),
        message.text,
        stops.tolist(),
        used.tolist(),
        i32(message.text_offset, "text_offset").tolist() if message.text_offset else None,
        message.elapsed_us / rows if rows else 0.0,
        message.cut,
        [(failed.handle, errors.from_message(failed.error)) for failed in message.errors],
    )
