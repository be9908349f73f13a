from __future__ import annotations

import random
import time
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire_tokenizer.detokenize.stop_matcher import StopMatcher, StopStrings, stop_strings
from tests.tiers import examples

STOPS = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4)
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def first_match(text: str, stops: list[str], immune: int = 0) -> tuple[int, int, int]:
    """(end, index, length) of the match that ends first, the longest of several; by trying everything."""
    ends = [
        (start + len(stop), -len(stop), index)
        for index, stop in enumerate(stops)
        for start in range(len(text))
        if text.startswith(stop, start) and start + len(stop) > immune
    ]
    if not ends:
        return -1, -1, 0
    end, length, index = min(ends)
    return end, index, -length


def largest_list() -> tuple[str, ...]:
    """As long as a request may send it."""
    drawn = random.Random(1)
    return tuple("".join(drawn.choices(LETTERS, k=512)) for _ in range(64))


@examples(1000)
@given(stops=STOPS, parts=st.lists(st.text("abc", max_size=4), max_size=6), unarmed=st.integers(0, 3))
def test_against_trying_everything(stops: list[str], parts: list[str], unarmed: int) -> None:
    matcher, text = StopMatcher(StopStrings(stops)), ""
    end, index, length = first_match("".join(parts), stops, len("".join(parts[:unarmed])))
    for number, part in enumerate(parts):
        found = matcher.feed(part, number >= unarmed)
        if found >= 0:
            assert (len(text) + found, matcher.stop_index, matcher.stop_length) == (end, index, length)
            return
        text += part
        possible = [n for n in range(1, len(text) + 1) for stop in stops if len(stop) > n and stop[:n] == text[-n:]]
        assert matcher.held == text[len(text) - max(possible, default=0) :]
    assert end == -1


def test_unarmed_matches_are_passed_over() -> None:
    matcher = StopMatcher(StopStrings(["aba"]))
    assert matcher.feed("xaba", armed=False) == -1
    assert matcher.held == "a"  # it may begin another
    assert matcher.feed("ba") == 2


@pytest.mark.parametrize("piece", [1, 4, 20_000])
def test_time_is_linear_in_the_text_and_not_in_the_stop_strings(piece: int) -> None:
    """The worst case of searching: a long run of what nearly matches, and many stop strings."""
    stops = StopStrings(["a" * 400 + chr(0x4E00 + n) for n in range(64)])
    text = "a" * 20_000

    def seconds(length: int) -> float:
        best = float("inf")
        for _ in range(3):
            matcher, started = StopMatcher(stops), time.process_time()
            for at in range(0, length, piece):
                assert matcher.feed(text[at : min(at + piece, length)]) == -1
            best = min(best, time.process_time() - started)
        return best

    assert seconds(20_000) < 25 * seconds(2_000) + 0.002
    assert seconds(20_000) < 0.5


def test_siblings_share_the_largest_list() -> None:
    """An automaton for each of n = 128 siblings once took 9 MiB, 1.2 GiB together."""
    sent = [largest_list() for _ in range(128)]
    tracemalloc.start()
    try:
        matchers = [StopMatcher(stop_strings(each)) for each in sent]
        for matcher in matchers:
            matcher.feed(sent[0][0][:300])
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 1_000_000
    assert len({id(matcher._stops) for matcher in matchers}) == 1


@pytest.mark.perf
def test_the_largest_list_costs_a_sequence_next_to_nothing() -> None:
    """Automata for n = 128 siblings took 3.5 s, in which their tokenizer did nothing else."""
    sent = [largest_list() for _ in range(128)]
    started = time.process_time()
    matchers = [StopMatcher(stop_strings(each)) for each in sent]
    seconds = time.process_time() - started
    assert len(matchers) == 128
    assert seconds < 0.05


def test_what_is_kept_for_the_next_request_is_small() -> None:
    """The largest stop lists that are allowed must not fill the memory when everybody sends another one."""
    tracemalloc.start()
    try:
        for number in range(200):
            stop_strings(tuple(f"{number:04d}{i:02d}" + "x" * 506 for i in range(64)))
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 3_000_000  # 8 MB if all stayed


def test_a_list_in_use_is_there_once_however_many_others_come() -> None:
    mine = stop_strings(("\n", "END"))
    for number in range(200):
        stop_strings((f"{number}",))
    assert stop_strings(("\n", "END")) is mine
