"""The pages of a long prompt are hashed in turns before its placement, so that the placement hashes nothing."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from quire_common.pages import PageExtras, chain_hashes
from quire_router.placement import placement_request
from quire_router.placement.placement_request import PlacementRequest
from quire_router.placement.replica_table import PagePool
from quire_router.requests.pipeline import Pipeline
from quire_router.requests.prompt_pages import TURN_TOKENS, forget_pages, name_pages
from quire_router.sequences.delta_queue import DeltaQueue
from quire_router.sequences.sequence_state import SequenceState
from tests.unit.router.makers import make_job, make_sequence

PAGE, SALT = 16, "tenant"
MILLION = np.arange(1_000_003, dtype=np.int32)
SHORT = np.arange(100, dtype=np.int32)
POOL = PagePool(b"n" * 32, PAGE, 1)


def siblings(prompt: np.ndarray, count: int = 2) -> list[SequenceState]:
    made = [make_sequence(make_job(n=count), DeltaQueue(), number) for number in range(count)]
    for sequence in made:
        sequence.spec = replace(sequence.spec, prompt_ids=prompt, cache_salt=SALT)
    return made


def named_at_once(prompt: np.ndarray) -> list[bytes]:
    return chain_hashes(prompt, PAGE, PageExtras(salt=SALT))


async def turns_of(sequences: list[SequenceState]) -> int:
    """Turns of the loop that others had meanwhile."""
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    ticker = asyncio.create_task(count())
    await name_pages(sequences, PAGE)
    ticker.cancel()
    return turns


async def test_long_prompt_is_hashed_in_turns_with_the_same_hashes() -> None:
    sequences = siblings(MILLION)
    assert await turns_of(sequences) >= len(MILLION) // TURN_TOKENS - 1
    assert sequences[0].placement.page_hashes == {PAGE: named_at_once(MILLION)}
    assert sequences[1].placement.page_hashes[PAGE] is sequences[0].placement.page_hashes[PAGE]
    forget_pages(sequences)
    assert not any(sequence.placement.page_hashes for sequence in sequences)


async def test_short_prompt_is_not_hashed_ahead() -> None:
    sequences = siblings(SHORT)
    assert await turns_of(sequences) == 0
    assert not sequences[0].placement.page_hashes


@pytest.mark.parametrize("output", [0, 5, 40])
async def test_placement_reuses_hashes_computed_ahead(output: int, monkeypatch: pytest.MonkeyPatch) -> None:
    sequences = siblings(MILLION)
    await name_pages(sequences, PAGE)
    sequence = replace(sequences[0].spec, output_ids=np.arange(output, dtype=np.int32))
    expected = PlacementRequest(sequence).chains(POOL)
    hashed: list[int] = []

    def counted(tokens: Any, *rest: Any) -> list[bytes]:
        hashed.append(len(tokens))
        return chain_hashes(tokens, *rest)

    monkeypatch.setattr(placement_request, "chain_hashes", counted)
    request = PlacementRequest(sequence, prompt_hashes=sequences[0].placement.page_hashes)
    assert [keys.tolist() for keys in request.chains(POOL)] == [keys.tolist() for keys in expected]
    assert request.head(POOL).tolist() == PlacementRequest(sequence).head(POOL).tolist()[:1]
    assert sum(hashed[:1]) <= output + PAGE


async def test_pipeline_hashes_a_long_prompt_before_placement() -> None:
    sequences, told = siblings(MILLION), list[int]()
    model = SimpleNamespace(pages=SimpleNamespace(page_size=PAGE))
    generation = SimpleNamespace(
        job=SimpleNamespace(siblings=2), sequences=sequences, served=SimpleNamespace(model=model), discard=pytest.fail
    )
    migration = SimpleNamespace(
        start=lambda some: told.extend(len(each.placement.page_hashes.get(PAGE, ())) for each in some)
    )
    pipeline: Any = SimpleNamespace(_migration=migration)
    given: Any = generation
    await Pipeline._place(pipeline, given, [MILLION])
    assert told == [len(MILLION) // PAGE] * 2
    assert not sequences[0].placement.page_hashes
