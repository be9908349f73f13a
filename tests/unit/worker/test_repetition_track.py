"""Repetition detection: what it finds is what its definition says, at a cost that no request can raise."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_common.repetition import MAX_PATTERN_COUNT, MAX_PATTERN_SIZE, RepetitionDetection
from quire_common.sequence import Sampling, Sequence, Stop
from quire_worker.sampling.logits_state import LogitsState
from quire_worker.sampling.repetition_track import RepetitionTrack, trailing_runs

MOST_US = 20.0
TRIES, TOKENS = 4, 20
RULES = st.builds(
    lambda most, least, count: RepetitionDetection(most, min(least, most), count),
    st.integers(1, 5),
    st.integers(0, 5),
    st.integers(2, 4),
)
# Patterns of patterns, so that runs begin, break off and begin again.
OUTPUTS = st.lists(st.tuples(st.lists(st.integers(0, 2), min_size=1, max_size=4), st.integers(1, 4)), max_size=5).map(
    lambda parts: [token for pattern, times in parts for token in pattern * times]
)


def by_definition(tokens: list[int], rule: RepetitionDetection) -> bool:
    """Whether the list ends by a pattern of an allowed size, so many times."""
    sizes = range(max(rule.min_pattern_size, 1), rule.max_pattern_size + 1)
    return any(
        len(tokens) >= size * rule.min_count and tokens[-size * rule.min_count :] == tokens[-size:] * rule.min_count
        for size in sizes
    )


@given(OUTPUTS, RULES, st.integers(0, 100))
def test_each_token_is_judged_by_the_definition(tokens: list[int], rule: RepetitionDetection, known: int) -> None:
    """`known` tokens were there when the sequence started again."""
    track = RepetitionTrack(rule, tokens[:known])
    for at in range(min(known, len(tokens)), len(tokens)):
        for other in (0, 1, 2):
            assert track.repeats(other) == by_definition([*tokens[:at], other], rule)
        if at % 2:
            assert track.repeats(tokens[at]) == by_definition(tokens[: at + 1], rule)
        track.add(tokens[at])


def test_a_long_output_is_judged_by_the_definition() -> None:
    """Longer than what is kept of it, with patterns of all sizes in it."""
    rng, rule = np.random.default_rng(3), RepetitionDetection(24, 3, 3)
    tokens, track, found = list[int](), RepetitionTrack(rule, []), 0
    while len(tokens) < 5_000:
        pattern = rng.integers(0, 3, int(rng.integers(1, 30))).tolist()
        for token in pattern * int(rng.integers(1, 5)):
            repeats = track.repeats(token)
            assert repeats == by_definition([*tokens, token], rule)
            found += repeats
            tokens.append(token)
            track.add(token)
    assert found > 100


@given(OUTPUTS, st.integers(1, 30))
def test_runs_of_known_tokens_are_those_that_were_counted(tokens: list[int], most: int) -> None:
    counted = [0] * (most + 1)
    for at, token in enumerate(tokens):
        counted = [
            counted[size] + 1 if 0 < size <= at and tokens[at - size] == token else 0 for size in range(most + 1)
        ]
    assert trailing_runs(np.array(tokens, np.int64), most).tolist() == counted


def test_it_waits_for_min_tokens_and_counts_those_before_them() -> None:
    stop = Stop(40, min_tokens=6, repetition=RepetitionDetection(1, 1, 3))
    controls = LogitsState.of(Sequence(np.array([1], np.int32), stop, Sampling()))
    assert controls is not None
    ended = []
    for _ in range(8):
        ended.append(controls.repeats(7))
        controls.fed(7)
    assert ended == [False] * 5 + [True] * 3


WORST = [
    pytest.param(RepetitionDetection(512, 256, 16), id="measured-68-ms"),
    pytest.param(RepetitionDetection(512, 256, 120), id="measured-524-ms"),
    pytest.param(RepetitionDetection(512, 1, 2), id="all-sizes"),
    pytest.param(RepetitionDetection(MAX_PATTERN_SIZE, 0, MAX_PATTERN_COUNT), id="most"),
    pytest.param(RepetitionDetection(1, 1, MAX_PATTERN_COUNT), id="one-token"),
]


@pytest.mark.parametrize("rule", WORST)
def test_no_rule_costs_more_than_20_us_a_token(rule: RepetitionDetection) -> None:
    """In a run of equal tokens. CPU time of this thread, the best of several tries: others may be busy."""
    stop = Stop(10**6, repetition=rule)
    controls = LogitsState.of(
        Sequence(np.array([1], np.int32), stop, Sampling(), output_ids=almost_repeated(rule, TRIES * TOKENS))
    )
    assert controls is not None
    tries = []
    for _ in range(TRIES):
        began = time.thread_time_ns()
        for _ in range(TOKENS):
            controls.repeats(7)
            controls.fed(7)
        tries.append((time.thread_time_ns() - began) / TOKENS / 1_000)
    assert min(tries) < MOST_US, f"{min(tries):.1f} us a token"


def almost_repeated(rule: RepetitionDetection, tokens: int) -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    """Make an output that is long enough for every size of the rule. Its run of 7 is `tokens` too short for a
    repetition of the smallest, so that a search of the output compares most of that run, once a size."""
    length = min(rule.max_pattern_size * rule.min_count, 100_000)
    run = max(rule.min_pattern_size, 1) * rule.min_count - tokens - 1
    others = length - min(max(run, 0), length)
    return np.where(np.arange(length) < others, np.arange(8, length + 8), 7).astype(np.int32)


@pytest.mark.parametrize("kind", ["equal", "period", "random"])
def test_an_output_of_100_000_tokens_is_taken_up_in_milliseconds(kind: str) -> None:
    """After a preemption or a migration, on the thread that runs steps."""
    count = 100_000
    tokens = {
        "equal": np.full(count, 7),
        "period": np.arange(count) % 509,
        "random": np.random.default_rng(1).integers(0, 2, count),
    }[kind].tolist()
    tries = []
    for _ in range(3):
        began = time.thread_time_ns()
        RepetitionTrack(RepetitionDetection(512, 1, MAX_PATTERN_COUNT), tokens)
        tries.append((time.thread_time_ns() - began) / 1e6)
    assert min(tries) < 30, f"{min(tries):.1f} ms"
