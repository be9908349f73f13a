"""SIGKILL and SIGSTOP of a worker's matcher under load: streams with grammars pause and go on with the same tokens, and
those beside them do not notice."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import statistics
import time
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import pairwise

import psutil
import pytest

from tests.chaos.answer import Answer, Ticks, over_http
from tests.chaos.judge import faults_wanted
from tests.chaos.rig import Rig
from tests.chaos.scripts import REGEX, Script, make_scripts

pytestmark = pytest.mark.slow

STREAMS = 6
WAIT_S = 60.0
# A frozen matcher is replaced after some three seconds.
FROZEN_S = 2.0


@dataclass
class Streams:
    """Each asks one script again and again, and compares what it gets with the first answer. Ticks are of all."""

    rig: Rig
    scripts: list[Script]
    wanted: dict[int, Answer] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    answers: int = 0
    ending: bool = False

    def __post_init__(self) -> None:
        self.ticks = [Ticks() for _ in self.scripts]

    async def learn(self) -> None:
        for script in self.scripts:
            answer = self.wanted[script.number] = await over_http(self.rig.http, script, Ticks())
            assert not script.regex or re.fullmatch(REGEX, answer.texts[0]) or answer.finishes[0] == "length"

    async def run(self, number: int) -> None:
        script, ticks = self.scripts[number], self.ticks[number]
        while not self.ending:
            ticks.tick()
            answer = await over_http(self.rig.http, script, ticks)
            if difference := self.wanted[script.number].difference(answer):
                self.failures.append(f"{script}: {difference}")
            self.answers += 1

    async def await_progress(self, since: float) -> None:
        """Wait until every stream has heard something behind a moment."""
        until = time.monotonic() + WAIT_S
        while not all(ticks.times and ticks.times[-1] > since for ticks in self.ticks):
            assert time.monotonic() < until, "a stream stands still"
            await asyncio.sleep(0.02)

    def pauses(self, begin: float, end: float, *, constrained: bool) -> list[float]:
        """The longest pause of each of these streams between two moments."""
        found = []
        for script, ticks in zip(self.scripts, self.ticks, strict=True):
            if bool(script.regex) == constrained:
                times = [begin, *(time for time in ticks.times if begin < time < end), end]
                found.append(max(b - a for a, b in pairwise(times)))
        return found


def matcher_of(rig: Rig) -> psutil.Process | None:
    """The worker's matcher, while it has one."""
    (member,) = rig.stack.spec.members_of("worker")
    for child in psutil.Process(rig.service(member).pid).children():
        with suppress(psutil.Error):  # it has just been killed
            if "quire_worker.matcher" in child.cmdline():
                return child
    return None


async def await_matcher(rig: Rig, other_than: int = 0) -> psutil.Process:
    until = time.monotonic() + WAIT_S
    while time.monotonic() < until:
        found = matcher_of(rig)
        if found is not None and found.pid != other_than:
            return found
        await asyncio.sleep(0.02)
    raise AssertionError("there is no matcher")


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
async def test_streams_with_grammars_pause_and_go_on_with_the_same_tokens(seed: int, number: signal.Signals) -> None:
    rng = random.Random(seed)
    made = [replace(script, n=1) for script in make_scripts(STREAMS, seed, 60, 150)]
    scripts = [replace(script, regex=REGEX if place % 2 else "") for place, script in enumerate(made)]
    async with Rig("paced 10", replicas=1, tokenizers=1) as rig:
        streams = Streams(rig, scripts)
        await streams.learn()
        tasks = [asyncio.create_task(streams.run(place)) for place in range(STREAMS)]
        moments, faults = list[tuple[float, float]](), faults_wanted(25 if number is signal.SIGKILL else 6)
        for _ in range(faults):
            matcher = await await_matcher(rig)
            await asyncio.sleep(rng.uniform(0.2, 1.2))
            begin = time.monotonic()
            os.kill(matcher.pid, number)
            await await_matcher(rig, other_than=matcher.pid)
            moments.append((begin, time.monotonic()))
            await streams.await_progress(moments[-1][1])
        streams.ending = True
        await asyncio.gather(*tasks)
    assert not streams.failures, streams.failures[:3]
    assert streams.answers > STREAMS
    if number is signal.SIGSTOP:
        paused = [min(streams.pauses(*moment, constrained=True)) for moment in moments]
        beside = [max(streams.pauses(*moment, constrained=False)) for moment in moments]
        assert statistics.median(paused) > FROZEN_S, paused
        assert statistics.median(beside) < FROZEN_S / 2, beside
