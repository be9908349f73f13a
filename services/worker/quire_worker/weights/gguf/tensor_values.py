"""The tensors of a GGUF file, read in pieces of whole rows, either as the bytes of their blocks or as float32 values.

The file is read, never mapped. So if it becomes shorter meanwhile, an error follows, and not the end of the process.
This module knows nothing of parameters.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from math import lcm, prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from quire_common.errors import Unsupported
from quire_common.gguf import TensorPlace, faults
from quire_worker.weights.gguf.dequantize import READABLE_KINDS, can_dequantize, dequantize

PIECE_VALUES = 1 << 20


def check_readable(place: TensorPlace) -> None:
    """Raise Unsupported for a kind of blocks that is not supported."""
    if not can_dequantize(place.kind):
        raise Unsupported(
            "UNSUPPORTED_WEIGHT_DTYPE",
            f"{place.path.name}: tensor {place.name} is {place.kind.name}; supported are {', '.join(READABLE_KINDS)}.",
            "Serve a file with another quantisation.",
        )


def read_values(place: TensorPlace) -> NDArray[np.float32]:
    """Return all values, in the tensor's shape."""
    pieces = [values for _, values in read_pieces(place, 1)]
    return np.concatenate(pieces).reshape(place.shape)


def read_pieces(
    place: TensorPlace, unit: int, seen: Callable[[memoryview], object] = lambda _: None
) -> Iterator[tuple[int, NDArray[np.float32]]]:
    """Yield (first row, [rows, ...] float32) of consecutive pieces, each of a multiple of `unit` rows.

    A tensor with one axis has rows of one value, in blocks of its kind. `seen` is called with the raw bytes in order.
    """
    for first, count, raw in read_blocks(place, unit, seen):
        yield first, dequantize(place.kind, raw).reshape(count, *place.shape[1:])


def read_blocks(
    place: TensorPlace, unit: int, seen: Callable[[memoryview], object] = lambda _: None
) -> Iterator[tuple[int, int, NDArray[np.uint8]]]:
    """Yield (first row, rows, bytes) of consecutive pieces, each of a multiple of `unit` rows and of about a million
    values, or more where `unit` rows have more; the last piece has what is left. `seen` is called with the raw bytes in
    order.

    Raises Unsupported for unsupported kinds of blocks, and the typed error of a file that cannot be read or becomes
    shorter.
    """
    check_readable(place)
    rows, row_shape = place.shape[0], place.shape[1:]
    values_per_row = prod(row_shape)
    if not row_shape:
        unit = lcm(unit, place.kind.values)
    step = max(1, PIECE_VALUES // (values_per_row * unit)) * unit
    try:
        with place.path.open("rb", buffering=0) as file:
            for first in range(0, rows, step):
                count = min(step, rows - first)
                raw = np.empty(count * place.num_bytes // rows, np.uint8)
                _read(file.fileno(), raw.data, place.begin + first * place.num_bytes // rows, place.path)
                seen(raw.data)
                yield first, count, raw
    except OSError as error:
        raise faults.unreadable(place.path, error) from error


def _read(file: int, into: memoryview, begin: int, path: Path) -> None:
    """Fill `into` from offset `begin` of the file. Raises the error of a truncated file if the file ends before
    that."""
    done = 0
    while done < len(into):
        count = os.preadv(file, [into[done:]], begin + done)
        if count == 0:
            raise faults.truncated(path, "it became shorter while it was read")
        done += count
