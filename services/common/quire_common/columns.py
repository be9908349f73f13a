"""Packed little-endian columns, one `bytes` field each: how repeated numbers travel. Never rows of packed fields."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from quire_common.errors import InvalidArgument

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

I32 = np.dtype("<i4")
I64 = np.dtype("<i8")
F32 = np.dtype("<f4")
U8 = np.dtype("u1")
MAX_I32 = 2**31 - 1
MAX_U32 = 2**32 - 1


def _none_of(dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return an empty, read-only column."""
    none: NDArray[Any] = np.empty(0, dtype)
    none.setflags(write=False)
    return none


# Columns without rows, read-only as all that are unpacked: one of each type for everybody.
NO_I32: NDArray[np.int32] = _none_of(I32)
NO_I64: NDArray[np.int64] = _none_of(I64)
NO_F32: NDArray[np.float32] = _none_of(F32)
NO_U8: NDArray[np.uint8] = _none_of(U8)


def pack(values: Sequence[int] | Sequence[float] | NDArray[Any], dtype: np.dtype[Any]) -> bytes:
    """Return the values as a column. A Python integer that does not fit the type raises OverflowError; elements of an
    array are converted without a check."""
    return np.asarray(values, dtype=dtype).tobytes() if len(values) else b""


def i32(column: bytes, name: str = "column") -> NDArray[np.int32]:
    """Return a read-only int32 view of the column. Raises InvalidArgument if its length is no multiple of 4."""
    return _view(column, I32, name) if column else NO_I32


def i64(column: bytes, name: str = "column") -> NDArray[np.int64]:
    """Return a read-only int64 view of the column. Raises InvalidArgument if its length is no multiple of 8."""
    return _view(column, I64, name) if column else NO_I64


def f32(column: bytes, name: str = "column") -> NDArray[np.float32]:
    """Return a read-only float32 view of the column. Raises InvalidArgument if its length is no multiple of 4."""
    return _view(column, F32, name) if column else NO_F32


def u8(column: bytes, name: str = "column") -> NDArray[np.uint8]:
    """Return a read-only uint8 view of the column."""
    return _view(column, U8, name) if column else NO_U8


def pack_i32(values: Sequence[int] | NDArray[Any]) -> bytes:
    """Ints as an int32 column."""
    return pack(values, I32)


def pack_i64(values: Sequence[int] | NDArray[Any]) -> bytes:
    """Ints as an int64 column."""
    return pack(values, I64)


def pack_f32(values: Sequence[float] | NDArray[Any]) -> bytes:
    """Floats as a float32 column."""
    return pack(values, F32)


def pack_u8(values: Sequence[int] | NDArray[Any]) -> bytes:
    """Small ints as a uint8 column."""
    return pack(values, U8)


def saturated_u32(value: int) -> int:
    """The nearest value of a uint32 field: a clock that says too much must not make a message impossible to write."""
    return min(max(value, 0), MAX_U32)


def equal_lengths(what: str, /, **columns: NDArray[Any]) -> int:
    """Return the common length of a group's columns; 0 without columns. Raises InvalidArgument if they differ; `what`
    names the group."""
    found = set(map(len, columns.values()))
    if len(found) > 1:
        lengths = {name: len(values) for name, values in columns.items()}
        raise InvalidArgument(
            "UNEQUAL_COLUMNS", f"Columns of {what} differ in length: {lengths}.", "Send columns of equal lengths."
        )
    return found.pop() if found else 0


def _view(column: bytes, dtype: np.dtype[Any], name: str) -> NDArray[Any]:
    """Return a read-only view of a column. Raises InvalidArgument if its length is no multiple of the element size."""
    if len(column) % dtype.itemsize:
        raise InvalidArgument(
            "BAD_COLUMN",
            f"Column {name} has {len(column)} bytes, no multiple of {dtype.itemsize}.",
            "Send packed little-endian values.",
            param=name,
        )
    return np.frombuffer(column, dtype)
