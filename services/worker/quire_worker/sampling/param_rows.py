"""Param rows: the sampling parameters of a sequence as one record of 32-bit words.

A record holds the random key, and every number of the table of request parameters that sampling depends on. The host
gathers records with `take`, which copies whole records; an index would copy field by field. The host uploads records
whole, and a kernel reads each number at its word offset. This module knows a request only by its `Sampling`.
"""

from __future__ import annotations

from operator import attrgetter
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from quire_common.request_parameters import LIMITS, SAMPLING_NUMBERS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from numpy.typing import ArrayLike, NDArray

    from quire_common.sequence import Sampling
    from quire_worker.arrays import Bool, Int32

    ParamRows = NDArray[np.void]
    """[N] of PARAM_ROW."""

GREEDY_BELOW: Final = 1e-5
"""Temperatures below this are greedy."""
_TYPES: Final = {"number": np.float32, "int": np.int32}
_FIELDS: Final = (
    # Its low and high halves are the random key.
    ("seed", np.uint64),
    # The index of the answer among the `n` answers to one prompt.
    ("sample_index", np.uint32),
    # 1: fewer than all tokens may be sampled.
    ("filtered", np.int32),
    *((each.name, _TYPES[each.kind]) for each in SAMPLING_NUMBERS),
)
_WORD: Final = 4
_used = sum(np.dtype(kind).itemsize for _name, kind in _FIELDS)
PARAM_ROW: Final = np.dtype([*_FIELDS, *([("unused", np.int32)] * (_used % 8 > 0))])
"""The size of a row is a multiple of the seed's size, so that each seed is aligned for 64-bit loads."""
WORDS: Final = PARAM_ROW.itemsize // _WORD
OFFSETS: Final[Mapping[str, int]] = {
    name: offset // _WORD for name, (_kind, offset, *_title) in (PARAM_ROW.fields or {}).items()
}
"""The word offset of each number by name."""
_NUMBERS: Final[Callable[[Sampling], tuple[Any, ...]]] = attrgetter(*(each.name for each in SAMPLING_NUMBERS))
_LIMITS: Final[Callable[[Sampling], tuple[Any, ...]]] = attrgetter(*(each.name for each in LIMITS))
_NEUTRAL: Final = tuple(each.default for each in LIMITS)
_UNUSED: Final = (0,) * ("unused" in (PARAM_ROW.names or ()))


def param_rows(count: int, **columns: ArrayLike) -> ParamRows:
    """Make `count` rows with these columns, and set `filtered` by them (see `mark_filtered`). All other numbers are
    neutral: greedy and without limits."""
    rows = np.zeros(count, PARAM_ROW)
    for each in LIMITS:
        rows[each.name] = each.default
    for name, values in columns.items():
        rows[name] = values
    mark_filtered(rows)
    return rows


def words_of(rows: ParamRows) -> Int32:
    """Return contiguous rows as [N, WORDS] int32. numpy copies this form faster than records."""
    words: Int32 = rows.view(np.int32).reshape(-1, WORDS)
    return words


def mark_filtered(rows: ParamRows) -> None:
    """Set `filtered` in each row: whether the row is not greedy and has a limit that is not its default. Call this
    after each change of a row's numbers."""
    rows["filtered"] = asks_limits(rows) & (rows["temperature"] >= GREEDY_BELOW)


def asks_limits(rows: ParamRows) -> Bool:
    """Return bool [N]: whether a row limits which tokens may be sampled, which is so if top_k, top_p or another limit
    is not its default."""
    asked: Bool = np.zeros(len(rows), np.bool_)
    for each in LIMITS:
        asked |= rows[each.name] != each.default
    return asked


def param_row(sampling: Sampling) -> tuple[Any, ...]:
    """Return the param row of a sequence as a tuple in the order of PARAM_ROW: random key, sample index, `filtered` and
    the sampling numbers. `filtered` is True if the sequence is not greedy and has limits."""
    hot = np.float32(sampling.temperature) >= np.float32(GREEDY_BELOW)
    filtered = hot and _LIMITS(sampling) != _NEUTRAL
    return (sampling.seed, sampling.sample, filtered, *_NUMBERS(sampling), *_UNUSED)


def rows_of(samplings: Iterable[Sampling]) -> ParamRows:
    """Return the param rows of some sequences."""
    return np.array([param_row(each) for each in samplings], PARAM_ROW)
