"""Packs and unpacks the columns of the contracts: little-endian int32 `bytes`, and plain lists. So a client needs no
numpy."""

from __future__ import annotations

import struct
from collections.abc import Sequence

from quire.errors import InvalidArgument

_WIDTH = 4


def pack_i32(values: Sequence[int], param: str) -> bytes:
    """Return the integers as little-endian int32 bytes. Raises InvalidArgument, naming `param`, for a value that is not
    an int32."""
    try:
        return struct.pack(f"<{len(values)}i", *values)
    except (struct.error, TypeError) as error:
        raise InvalidArgument(
            "BAD_TOKEN_IDS", f"{param} must hold integers of 32 bits.", "Pass a list of token ids.", param=param
        ) from error


def unpack_i32(column: bytes) -> list[int]:
    """Return the integers of little-endian int32 bytes; bytes beyond a multiple of 4 raise struct.error."""
    return list(struct.unpack(f"<{len(column) // _WIDTH}i", column))
