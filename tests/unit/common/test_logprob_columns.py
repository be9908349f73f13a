"""Logprob columns: joined, sliced and selected, each entry keeps its alternatives and finds its token."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from quire_common.credit import LogprobColumns
from quire_common.credit.logprobs import join_logprobs

Entry = tuple[int, float, list[tuple[int, float]]]
ENTRIES = st.dictionaries(st.integers(0, 9), st.integers(0, 3), max_size=6)


def columns_of(entries: dict[int, int], seed: int = 0) -> LogprobColumns:
    """Entries for tokens of a column of ten, each with so many alternatives."""
    index = np.array(sorted(entries), np.int32)
    count = np.array([entries[token] for token in index.tolist()], np.int32)
    tops = np.arange(count.sum(), dtype=np.int32) + 100 * seed
    return LogprobColumns(
        index, -index.astype(np.float32) - seed, index + np.int32(1), count, tops, -tops.astype(np.float32)
    )


def entries_of(columns: LogprobColumns | None) -> list[Entry]:
    if columns is None:
        return []
    ends = np.cumsum(columns.top_count).tolist()
    tops = list(zip(columns.top_id.tolist(), columns.top_logprob.tolist(), strict=True))
    rows = zip(columns.token_index.tolist(), columns.logprob.tolist(), columns.top_count.tolist(), ends, strict=True)
    return [(index, logprob, tops[end - count : end]) for index, logprob, count, end in rows]


@given(ENTRIES, ENTRIES)
def test_join_shifts_each_part_to_where_its_tokens_begin(first: dict[int, int], second: dict[int, int]) -> None:
    one, other = columns_of(first), columns_of(second, seed=1)
    joined = join_logprobs([(0, one), (4, None), (10, other)])
    assert entries_of(joined) == entries_of(one) + [(10 + index, *rest) for index, *rest in entries_of(other)]


def test_join_of_nothing_is_none() -> None:
    assert join_logprobs([(0, None), (3, None)]) is None


@given(ENTRIES, st.data())
def test_slices_of_entries_cover_the_whole(entries: dict[int, int], data: st.DataObject) -> None:
    columns = columns_of(entries)
    cut = data.draw(st.integers(0, len(columns)))
    parts = [(0, columns.slice(0, cut, 0)), (6, columns.slice(cut, len(columns), 6))]
    assert entries_of(join_logprobs(parts)) == entries_of(columns)


@given(ENTRIES, st.lists(st.booleans(), min_size=10, max_size=10))
def test_selection_keeps_entries_of_the_chosen_tokens(entries: dict[int, int], chosen: list[bool]) -> None:
    columns, mask = columns_of(entries), np.array(chosen, np.bool_)
    place = np.cumsum(mask) - 1
    wanted = [(int(place[index]), *rest) for index, *rest in entries_of(columns) if mask[index]]
    assert entries_of(columns.select(mask)) == wanted


@given(ENTRIES)
def test_numbered_columns_count_their_entries(entries: dict[int, int]) -> None:
    columns = columns_of(entries)
    numbered = columns.numbered()
    assert numbered.token_index.tolist() == list(range(len(entries)))
    assert [rest for _, *rest in entries_of(numbered)] == [rest for _, *rest in entries_of(columns)]
