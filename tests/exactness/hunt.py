"""Runs many scenarios, and makes the first that goes wrong as small as it gets, so that a person can read it."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import cache, partial
from multiprocessing import get_context
from typing import TYPE_CHECKING, Protocol, TypeVar

from tests.exactness.events import Events
from tests.exactness.judge import Wrong, judge, judge_alone
from tests.exactness.scenario import ONE_EACH, make_scenario, without
from tests.exactness.virtual.virtual_kvstore import StoreWeather

if TYPE_CHECKING:
    from collections.abc import Callable

    from _typeshed import DataclassInstance
    from pytest import MonkeyPatch

    from tests.exactness.mutations import Mutation
    from tests.exactness.scenario import Scale, Scenario
    from tests.exactness.subject import Subject

    class Scaled(Protocol):
        """What scenarios are made for."""

        @property
        def scale(self) -> Scale:
            """Its sizes."""

    S = TypeVar("S", bound=Scaled)
    C = TypeVar("C", bound=DataclassInstance)
    Make = Callable[[int, Scale], Scenario]
    Judge = Callable[[Subject, Scenario], Events]

_SHRINK_LIMIT_S = 60.0


def run_scenarios(subject: Subject, seeds: Iterable[int], make: Make = make_scenario, judge: Judge = judge) -> Events:
    """What happened in all of them; raises Wrong with the smallest scenario that still goes wrong."""
    events = Events()
    for seed in seeds:
        scenario = make(seed, subject.scale)
        try:
            events.update(judge(subject, scenario))
        except Wrong as wrong:
            print(wrong, flush=True)
            small, why = shrink(subject, scenario, wrong, judge)
            raise Wrong(f"{wrong}\n\nscenario {seed}, made smaller: {why}\n{small}") from why
        events["scenarios"] += 1
    return events


def run_plainly(
    subject: S, seeds: Iterable[int], make: Callable[[int, Scale], C], judge: Callable[[S, C], Events]
) -> Events:
    """What happened in all of them; raises the first Wrong as it is."""
    events = Events()
    for seed in seeds:
        events.update(judge(subject, make(seed, subject.scale)))
        events["scenarios"] += 1
    return events


def run_in_processes(
    run: Callable[[S, Iterable[int]], Events], make_subject: Callable[[str], S], kind: str, count: int
) -> Events:
    """What happened in the scenarios from 0 to `count` - 1, which as many processes run as there are processors. Raises
    the first Wrong. `run` and `make_subject` are functions of modules, or partial calls of such."""
    make_subject(kind)  # a model that cannot be had skips the test here
    processes = os.cpu_count() or 1
    size = max(1, count // (8 * processes))
    parts = [range(first, min(first + size, count)) for first in range(0, count, size)]
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        return sum(pool.map(partial(_run_part, run, make_subject, kind), parts), Events())


def _run_part(
    run: Callable[[S, Iterable[int]], Events], make_subject: Callable[[str], S], kind: str, seeds: range
) -> Events:
    return run(_subject_of_this_process(make_subject, kind), seeds)


@cache
def _subject_of_this_process(make_subject: Callable[[str], S], kind: str) -> S:
    return make_subject(kind)


def first_wrong(
    subject: S,
    seeds: Iterable[int],
    make: Callable[[int, Scale], C] = make_scenario,  # type: ignore[assignment]  # the usual kind
    judge: Callable[[S, C], Events] = judge_alone,  # type: ignore[assignment]  # the usual kind
    **weather: object,
) -> tuple[int, Wrong] | None:
    """The first scenario that goes wrong free-running, if any does. `weather`: what all of them have in common."""
    for seed in seeds:
        try:
            judge(subject, replace(make(seed, subject.scale), **weather))
        except Wrong as wrong:
            return seed, wrong
    return None


def require_noticed(
    mutation: Mutation,
    patch: MonkeyPatch,
    subject: S,
    seeds: range,
    make: Callable[[int, Scale], C] = make_scenario,  # type: ignore[assignment]  # the usual kind
    judge: Callable[[S, C], Events] = judge_alone,  # type: ignore[assignment]  # the usual kind
) -> None:
    """Break the rule; one of the scenarios must go wrong in the mutation's weather."""
    mutation.break_rule(patch)
    found = first_wrong(subject, seeds, make, judge, **mutation.weather)
    assert found is not None, f"{len(seeds)} scenarios went well though a rule was broken: {mutation.name}"
    seed, wrong = found
    print(f"\n{mutation.name}, {type(subject).__name__}: found by scenario {seed}: {str(wrong)[:200]}")


def shrink(subject: Subject, scenario: Scenario, wrong: Wrong, judge: Judge = judge) -> tuple[Scenario, Wrong]:
    """The smallest scenario found that goes wrong, in whatever way, and how it does."""
    until, found = time.monotonic() + _SHRINK_LIMIT_S, True
    while found:
        found = False
        for smaller in _smaller(scenario):
            if time.monotonic() > until:
                return scenario, wrong
            try:
                judge(subject, smaller)
            except Wrong as why:
                scenario, wrong, found = smaller, why, True
                break
    return scenario, wrong


def _smaller(scenario: Scenario) -> Iterator[Scenario]:
    asks = scenario.asks
    if len(asks) > 1:
        for place in range(len(asks)):
            if left := without(asks, place):
                yield replace(scenario, asks=left)
    simple: dict[str, object] = {
        "policy": "fcfs",
        "chunk": 0,
        "beside": 0,
        "partial": 1,
        "tokens_per_step": 512,
        "think_us": 0,
        "coalesce": False,
        "tiers": None,
        "kvstore": False,
        "prefix_cache": False,
        "store": StoreWeather(),
        "lose_rows": 0.0,
        "row_tokens": 1,
        "constrained_row_tokens": 1,
        "odds": ONE_EACH,
        "lost_us": None,
        "leave_us": None,
        "settle": "launch",
        "grant_us": (0, 0),
        "report_us": (0, 0),
        "step_us": (1_000, 1_000),
    }
    for name, value in simple.items():
        if getattr(scenario, name) != value:
            yield replace(scenario, **{name: value})  # type: ignore[arg-type]  # names fields of Scenario
    plain: dict[str, object] = {
        "min_tokens": 0,
        "stop_token_ids": (),
        "ignore_eos": True,
        "resumed": 0,
        "abort_us": None,
        "deadline_us": None,
        "session": 0,
        "priority": 0,
        "tenant": "a",
        "shared": 0,
        "cache_salt": "",
    }
    for place, ask in enumerate(asks):
        for name, value in plain.items():
            if getattr(ask, name) != value:
                changed = replace(ask, **{name: value})  # type: ignore[arg-type]  # names fields of Ask
                yield replace(scenario, asks=(*asks[:place], changed, *asks[place + 1 :]))
