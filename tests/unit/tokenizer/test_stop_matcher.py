from __future__ import annotations

import time
import tracemalloc

from hypothesis import given, settings
from hypothesis import strategies as st

from quire_tokenizer.stop_matcher import StopAutomaton, StopMatcher, compile_stops

STOPS = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4)


def first_match(text: str, stops: list[str]) -> tuple[int, int, int]:
    """(end, index, length) of the match that ends first, the longest of several; by trying everything."""
    ends = [
        (start + len(stop), -len(stop), index)
        for index, stop in enumerate(stops)
        for start in range(len(text))
        if text.startswith(stop, start)
    ]
    if not ends:
        return -1, -1, 0
    end, length, index = min(ends)
    return end, index, -length


@given(stops=STOPS, parts=st.lists(st.text("abc", max_size=4), max_size=6))
@settings(max_examples=500, deadline=None)
def test_against_trying_everything(stops: list[str], parts: list[str]) -> None:
    matcher, text = StopMatcher(StopAutomaton(stops)), ""
    end, index, length = first_match("".join(parts), stops)
    for part in parts:
        found = matcher.feed(part)
        if found >= 0:
            assert (len(text) + found, matcher.stop_index, matcher.stop_length) == (end, index, length)
            return
        text += part
        possible = [n for n in range(1, len(text) + 1) for stop in stops if len(stop) > n and stop[:n] == text[-n:]]
        assert matcher.hold == max(possible, default=0)
    assert end == -1


def test_unarmed_matches_are_passed_over() -> None:
    matcher = StopMatcher(StopAutomaton(["aba"]))
    assert matcher.feed("xaba", armed=False) == -1
    assert matcher.hold == 1  # the last a may begin another
    assert matcher.feed("ba") == 2


def test_time_is_linear_in_the_text_and_not_in_the_stop_strings() -> None:
    """The worst case of searching: a long run of what nearly matches, and many stop strings."""
    automaton = StopAutomaton(["a" * 400 + chr(0x4E00 + n) for n in range(64)])
    text = "a" * 20_000

    def seconds(length: int) -> float:
        best = float("inf")
        for _ in range(3):
            matcher, started = StopMatcher(automaton), time.process_time()
            assert matcher.feed(text[:length]) == -1
            best = min(best, time.process_time() - started)
        return best

    assert seconds(20_000) < 25 * seconds(2_000)


def test_what_is_kept_for_the_next_request_is_small() -> None:
    """The largest stop lists that are allowed must not fill the memory when everybody sends another one."""
    compile_stops(("\n", "END"))
    tracemalloc.start()
    try:
        for number in range(200):
            compile_stops(tuple(f"{number:04d}{i:02d}" + "x" * 506 for i in range(4)))
        kept, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert kept < 10_000_000
    assert compile_stops(("\n", "END")) is compile_stops(("\n", "END"))
