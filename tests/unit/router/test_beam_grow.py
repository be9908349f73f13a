"""One step of a beam search against its plain definition: make all that could follow, sort, keep the best."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest

from quire_router.requests.beam_search import Beam, _grow, _Search
from quire_router.sequences.delta import LogprobEntry
from quire_router.sequences.job import GenerateJob


def entry_of(drawn: random.Random, count: int) -> LogprobEntry:
    ids = drawn.sample(range(1000), count)
    return LogprobEntry(ids[0], -1.0, 1, ids, sorted((-drawn.expovariate(1) for _ in ids), reverse=True))


def plain(
    search: _Search, entries: list[LogprobEntry], job: GenerateJob, ends: frozenset[int]
) -> tuple[list[Beam], ...]:
    live, ended = list[Beam](), list(search.ended)
    for beam, entry in zip(search.live, entries, strict=True):
        for rank, (token, logprob) in enumerate(zip(entry.top_ids, entry.top_logprobs, strict=True), 1):
            told = LogprobEntry(token, logprob, rank, entry.top_ids, entry.top_logprobs)
            new = Beam((*beam.ids, token), beam.logprob + logprob, (*beam.entries, told), token in ends)
            (ended if new.stopped else live).append(new)

    def score(beam: Beam) -> float:
        return beam.score(len(search.prompt_ids), job.length_penalty)

    return sorted(live, key=score, reverse=True)[: job.n], sorted(ended, key=score, reverse=True)[: job.n]


@pytest.mark.parametrize("seed", range(40))
def test_a_step_keeps_what_the_plain_definition_keeps(seed: int) -> None:
    drawn = random.Random(seed)
    job = GenerateJob("m", (), n=drawn.choice([1, 2, 5]), length_penalty=drawn.choice([0.0, 0.7, 1.0, 2.0]))
    ends = frozenset(drawn.sample(range(1000), 200))
    search = _Search(np.zeros(drawn.randint(1, 30), np.int32), 1000)
    for _ in range(6):
        entries = [entry_of(drawn, 2 * job.n) for _ in search.live]
        live, ended = plain(search, entries, job, ends)
        _grow(search, entries, job, ends)
        assert search.ended == ended
        if not search.live:  # none can come to be told any more
            break
        assert search.live == live


def test_a_step_of_many_long_beams_is_short() -> None:
    """128 beams of 400 tokens took 0.8 s of the event loop, and whatever had ended was kept."""
    drawn = random.Random(1)
    search = _Search(np.zeros(50, np.int32), 1000)
    entries = [entry_of(drawn, 256) for _ in range(128)]
    search.live = [Beam(tuple(range(400)), -float(i), tuple(entries[:1] * 400)) for i in range(128)]
    started = time.thread_time()
    _grow(search, entries, GenerateJob("m", (), n=128), frozenset(range(0, 1000, 2)))
    assert time.thread_time() - started < 0.25
    assert len(search.live) == len(search.ended) == 128
