"""A large step in pieces: each of bounded size, in the order in which a router takes a message's parts, all there."""

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
    without_handles,
)
from quire_scheduler.service.output_split import split_outputs
from quire_scheduler.service.session_wire import outputs_to_pb
from tests.unit.scheduler.service.test_row_join import ROWS, Row, by_handle, outputs

KIB = 1024


def finished(handle: int) -> FinishedNote:
    return FinishedNote(handle, 1, 1, 0, -1, [])


def scored(owner: int, first: int, entries: int, tops: int) -> PromptLogprobs:
    rng = np.random.default_rng(owner)
    columns = LogprobColumns(
        np.arange(entries, dtype=np.int32),
        rng.random(entries, np.float32),
        rng.integers(1, 9, entries).astype(np.int32),
        np.full(entries, tops, np.int32),
        rng.integers(0, 99, entries * tops).astype(np.int32),
        rng.random(entries * tops, np.float32),
    )
    return PromptLogprobs(owner, first, columns)


def entries_of(*told: SessionOutputs) -> list[tuple[int, float, int, list[int]]]:
    """Handle, logprob, rank and alternatives of each token that has logprobs, in order."""
    found = []
    for out in told:
        if out.logprobs is None:
            continue
        handles = np.repeat(out.handle, out.count)[out.logprobs.token_index].tolist()
        ends = np.cumsum(out.logprobs.top_count)
        columns = zip(
            handles,
            out.logprobs.logprob.tolist(),
            out.logprobs.rank.tolist(),
            ends.tolist(),
            out.logprobs.top_count.tolist(),
            strict=True,
        )
        found += [(h, lp, rank, out.logprobs.top_id[end - n : end].tolist()) for h, lp, rank, end, n in columns]
    return found


@given(ROWS, st.frozensets(st.integers(-1, 5)), st.integers(1, 300))
def test_split_step_loses_nothing(rows: list[Row], asked: frozenset[int], most: int) -> None:
    step = outputs(rows, asked)
    step.finished = [finished(handle) for handle in sorted({row[0] for row in rows})]
    step.admitted = [AdmittedNote(handle, 0, 0) for handle in range(3)]
    step.failed = [FailedNote(9, Internal("A", "b", "c"))]
    pieces = split_outputs(step, most)
    assert by_handle(*pieces) == by_handle(step)
    assert entries_of(*pieces) == entries_of(step)
    assert sorted(note.handle for piece in pieces for note in piece.finished) == [n.handle for n in step.finished]
    order = [
        (bool(piece.admitted), bool(len(piece.handle) or piece.finished), bool(piece.failed))
        for piece in pieces
        if len(pieces) > 1
    ]
    assert order == sorted(order, key=lambda kinds: kinds.index(True)), "admissions, rows, failures"
    seen: set[int] = set()
    for piece in reversed(pieces):
        assert seen.isdisjoint(note.handle for note in piece.finished), "a row after its request's finished note"
        seen.update(piece.handle.tolist())


def test_prompt_logprobs_are_cut_within_a_chunk() -> None:
    step = replace(outputs([(1, [5], 0)]), prompt_logprobs=[scored(1, 1, 700, 20), scored(2, 501, 3, 2)])
    pieces = split_outputs(step, 16 * KIB)
    assert max(outputs_to_pb(piece).ByteSize() for piece in pieces) <= 18 * KIB
    chunks = [chunk for piece in pieces for chunk in piece.prompt_logprobs]
    for whole in step.prompt_logprobs:
        mine = [chunk for chunk in chunks if chunk.owner == whole.owner]
        assert [chunk.first for chunk in mine] == np.cumsum(
            [whole.first, *(len(chunk.logprobs.logprob) for chunk in mine[:-1])]
        ).tolist()
        for name in ("logprob", "rank", "top_count", "top_id", "top_logprob"):
            joined = np.concatenate([getattr(chunk.logprobs, name) for chunk in mine])
            np.testing.assert_array_equal(joined, getattr(whole.logprobs, name))


@pytest.mark.parametrize("what", ["admitted", "failed", "prefilled", "pulled", "finished", "rows"])
def test_each_piece_of_a_step_is_bounded(what: str) -> None:
    """Of 2,048 requests."""
    step = outputs([])
    error = Internal("A", "b" * 100, "c" * 100)
    match what:
        case "admitted":
            step.admitted = [AdmittedNote(handle, 0, 0) for handle in range(2048)]
        case "failed":
            step.failed = [FailedNote(handle, error) for handle in range(2048)]
        case "prefilled":
            step.prefilled = [PrefilledNote(handle, []) for handle in range(2048)]
        case "pulled":
            step.pulled = [PulledNote(handle, 1, 2, 3, error) for handle in range(2048)]
        case "finished":
            step.finished = [finished(handle) for handle in range(2048)]
        case _:
            step = outputs([(handle, [200] * 40, 0) for handle in range(2048)], frozenset(range(2048)))
    pieces = split_outputs(step, 64 * KIB)
    assert len(pieces) > 1
    assert max(outputs_to_pb(piece).ByteSize() for piece in pieces) <= 70 * KIB


def test_small_step_is_not_split() -> None:
    step = outputs([(handle, [1], 0) for handle in range(512)])
    assert split_outputs(step, KIB * KIB)[0] is step


def test_without_handles_removes_rows_and_finished_notes() -> None:
    step = outputs([(1, [5], 1), (2, [6], 1), (1, [7], 0)], frozenset({1, 2}))
    step.finished = [finished(1), finished(2)]
    rest = without_handles(step, {1})
    assert by_handle(rest) == {2: ([6], 1)}
    assert [note.handle for note in rest.finished] == [2]
    assert entries_of(rest) == [entry for entry in entries_of(step) if entry[0] == 2]
