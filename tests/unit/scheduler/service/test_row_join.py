"""Steps that wait for a router, joined: what each request is told is what the steps tell it, in their order."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_common.credit import LogprobColumns, PromptLogprobs
from quire_common.errors import Internal
from quire_scheduler.core.outputs import (
    AdmittedNote,
    FailedNote,
    FinishedNote,
    PrefilledNote,
    PulledNote,
    SessionOutputs,
)
from quire_scheduler.service.row_join import MOST_JOINED_TOKENS, join
from tests.unit.scheduler.core.test_outputs import ids

Row = tuple[int, list[int], int]
"""Handle, tokens, finish."""
FINISHED = FinishedNote(3, 1, 1, 0, -1, [])


def outputs(rows: list[Row], asked: frozenset[int] = frozenset()) -> SessionOutputs:
    """Logprobs of the handles that asked: of a token t -t, rank t + 1, and as many others as t % 3."""
    handles, tokens, finishes = zip(*rows, strict=True) if rows else ((), (), ())
    token = ids(*(token for each in tokens for token in each))
    out = SessionOutputs(1, ids(*handles), ids(*map(len, tokens)), token, np.array(finishes, np.uint8))
    index = np.flatnonzero(np.isin(np.repeat(out.handle, out.count), [*asked])).astype(np.int32)
    if len(index):
        told, tops = token[index], [each for each in token[index].tolist() for _ in range(each % 3)]
        out.logprobs = LogprobColumns(
            index, -told.astype(np.float32), told + 1, told % 3, ids(*tops), -np.array(tops, np.float32)
        )
    return out


def by_handle(*told: SessionOutputs) -> dict[int, tuple[list[int], int]]:
    """All tokens of each handle in order, and its last finish."""
    found: dict[int, tuple[list[int], int]] = {}
    for out in told:
        at = 0
        for handle, count, finish in zip(out.handle.tolist(), out.count.tolist(), out.finish.tolist(), strict=True):
            found[handle] = found.get(handle, ([], 0))[0] + out.token[at : at + count].tolist(), finish
            at += count
    return found


ROWS = st.lists(st.tuples(st.integers(-1, 5), st.lists(st.integers(0, 9), max_size=3), st.integers(0, 2)), max_size=9)
STEPS = st.tuples(ROWS, ROWS, ROWS)


@given(STEPS, st.frozensets(st.integers(-1, 5)))
def test_join_gives_each_request_one_row(steps: tuple[list[Row], ...], asked: frozenset[int]) -> None:
    first, second, third = (outputs(step, asked) for step in steps)
    wanted = by_handle(first, second, third)
    joined = join(first, second)
    joined = None if joined is None else join(joined, third)
    assert joined is not None and by_handle(joined) == wanted and len(joined.handle) == len(wanted)
    columns = (joined.handle, joined.count, joined.token, joined.finish)
    assert [column.dtype.name for column in columns] == ["int32", "int32", "int32", "uint8"]
    rows = [(handle, tokens, finish) for handle, (tokens, finish) in sorted(wanted.items())]
    assert_same(joined.logprobs, outputs(rows, asked).logprobs)


def assert_same(one: LogprobColumns | None, other: LogprobColumns | None) -> None:
    assert (one is None) is (other is None)
    if one is not None and other is not None:
        for name in ("token_index", "logprob", "rank", "top_count", "top_id", "top_logprob"):
            assert getattr(one, name).tolist() == getattr(other, name).tolist(), name


def test_join_keeps_notes_in_order() -> None:
    first = replace(outputs([(3, [7], 1)]), finished=[FINISHED], pulled=[PulledNote(5, 0, 1, 5, None)])
    second = replace(
        outputs([(4, [8, 9], 0)]),
        admitted=[AdmittedNote(6, 0, 0)],
        finished=[FINISHED._replace(handle=4)],
        failed=[FailedNote(7, Internal("X", "", ""))],
        prefilled=[PrefilledNote(8, [])],
    )
    joined = join(first, second)
    assert joined is not None and by_handle(joined) == {3: ([7], 1), 4: ([8, 9], 0)}
    assert [note.handle for note in joined.finished] == [3, 4] and joined.pulled == first.pulled
    assert (joined.admitted, joined.failed, joined.prefilled) == (second.admitted, second.failed, second.prefilled)
    assert first.finished == [FINISHED], "what is joined is as it was"


def test_join_accepts_a_step_without_rows() -> None:
    joined = join(replace(outputs([]), admitted=[AdmittedNote(1, 0, 0)]), outputs([(1, [5], 0)]))
    assert joined is not None and by_handle(joined) == {1: ([5], 0)} and joined.admitted


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"admitted": [AdmittedNote(9, 0, 0)]},
        {"finished": [FINISHED._replace(handle=9)]},
        {"failed": [FailedNote(9, Internal("X", "", ""))]},
        {"prefilled": [PrefilledNote(9, [])]},
        {"pulled": [PulledNote(9, 0, 1, 5, None)]},
    ],
)
def test_reused_handle_is_not_joined(said: dict[str, object]) -> None:
    first = replace(outputs([] if said else [(9, [5], 1)]), **said)  # type: ignore[arg-type]  # one field, by name
    second = outputs([(8, [6], 0)])
    assert join(first, second) is not None
    assert join(first, replace(second, admitted=[AdmittedNote(8, 0, 0)])) is not None
    assert join(first, replace(second, admitted=[AdmittedNote(9, 0, 0)])) is None


def test_large_messages_are_not_joined() -> None:
    row, half = outputs([(1, [5], 0)]), outputs([(1, [5] * (MOST_JOINED_TOKENS // 2), 0)])
    full = join(half, half)
    assert full is not None and join(full, row) is None
    assert join(row, replace(row, prompt_logprobs=[PromptLogprobs(1, 0, LogprobColumns())])) is None
