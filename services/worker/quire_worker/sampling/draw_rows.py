"""Draw rows: the inputs of a sequence's sampling, beside its logits and its position, as one record of 32-bit words.

A record has the random key and every number on which sampling depends by the table of request parameters. Hosts gather
records (by `take`, which copies whole records; an index goes field by field) and upload them whole. A kernel reads each
number at its word. This module knows a request only by its `Sampling`.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from quire_common.request_parameters import DRAW_NUMBERS, LIMITS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from numpy.typing import ArrayLike, NDArray

    from quire_common.sequence import Sampling
    from quire_worker.arrays import Bool, Int32

    DrawRows = NDArray[np.void]
    """[N] of DRAW_ROW."""

GREEDY_BELOW: Final = 1e-5
"""Temperatures below are greedy."""
_TYPES: Final = {"number": np.float32, "int": np.int32}
_FIELDS: Final = (
    # Low and high halves are the random key.
    ("seed", np.uint64),
    # Index of a sibling among n.
    ("sample_index", np.uint32),
    # 1: fewer than all tokens may be drawn.
    ("filtered", np.int32),
    *((each.name, _TYPES[each.kind]) for each in DRAW_NUMBERS),
)
_WORD: Final = 4
_used = sum(np.dtype(kind).itemsize for _name, kind in _FIELDS)
DRAW_ROW: Final = np.dtype([*_FIELDS, *([("unused", np.int32)] * (_used % 8 > 0))])
"""A row is whole seeds long, so that each seed is where 64 bits are read at once."""
WORDS: Final = DRAW_ROW.itemsize // _WORD
OFFSETS: Final[Mapping[str, int]] = {
    name: offset // _WORD for name, (_kind, offset, *_title) in (DRAW_ROW.fields or {}).items()
}
"""Words of a row by name."""
_NUMBERS: Final[Callable[[Sampling], tuple[Any, ...]]] = attrgetter(*(each.name for each in DRAW_NUMBERS))
_LIMITS: Final[Callable[[Sampling], tuple[Any, ...]]] = attrgetter(*(each.name for each in LIMITS))
_NEUTRAL: Final = tuple(each.default for each in LIMITS)
_UNUSED: Final = (0,) * ("unused" in (DRAW_ROW.names or ()))


def draw_rows(count: int, **columns: ArrayLike) -> DrawRows:
    """Make `count` rows with these columns; all other numbers are neutral: greedy and without limits."""
    rows = np.zeros(count, DRAW_ROW)
    for each in LIMITS:
        rows[each.name] = each.default
    for name, values in columns.items():
        rows[name] = values
    mark_filtered(rows)
    return rows


def words_of(rows: DrawRows) -> Int32:
    """[N, WORDS] of rows that lie one after the other; by these numpy copies rows faster than one by one."""
    words: Int32 = rows.view(np.int32).reshape(-1, WORDS)
    return words


def mark_filtered(rows: DrawRows) -> None:
    """Set `filtered` in each row: whether it is not greedy and has limits. Must be called after a change of its
    numbers."""
    rows["filtered"] = asks_limits(rows) & (rows["temperature"] >= GREEDY_BELOW)


def asks_limits(rows: DrawRows) -> Bool:
    """[N] whether a row limits which tokens may be drawn (top_k, top_p and the like)."""
    asked: Bool = np.zeros(len(rows), np.bool_)
    for each in LIMITS:
        asked |= rows[each.name] != each.default
    return asked


def draw_row(sampling: Sampling) -> tuple[Any, ...]:
    """The draw row of a sequence, as a tuple in the order of DRAW_ROW."""
    hot = np.float32(sampling.temperature) >= np.float32(GREEDY_BELOW)
    filtered = hot and _LIMITS(sampling) != _NEUTRAL
    return (sampling.seed, sampling.sample, filtered, *_NUMBERS(sampling), *_UNUSED)


def rows_of(samplings: Iterable[Sampling]) -> DrawRows:
    """The draw rows of some sequences."""
    return np.array([draw_row(each) for each in samplings], DRAW_ROW)
