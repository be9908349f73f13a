"""Minutes of random load and faults, and what must not grow meanwhile: memory, files, pages. QUIRE_SOAK_MINUTES: how
long; 3 unless said."""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import time
from dataclasses import dataclass, field

import psutil
import pytest

from tests.chaos.faults import Saboteur
from tests.chaos.judge import STREAMS, assert_unharmed
from tests.chaos.load import Load
from tests.chaos.rig import Rig
from tests.chaos.scripts import make_scripts

pytestmark = pytest.mark.slow
SAMPLE_S = 2.0
# Before it, caches fill and pools open.
WARM_SHARE = 0.4
MOST_MB_PER_MINUTE = 6.0
MOST_FILES = 24


@dataclass
class Growth:
    """Of one process over its life."""

    times: list[float] = field(default_factory=list)
    mb: list[float] = field(default_factory=list)
    files: list[int] = field(default_factory=list)

    def add(self, mb: float, files: int) -> None:
        self.times.append(time.monotonic() / 60)
        self.mb.append(mb)
        self.files.append(files)

    def settled(self) -> tuple[float, int]:
        """MB per minute, and files more than at the time when it was warm."""
        first = int(len(self.times) * WARM_SHARE)
        slope = statistics.linear_regression(self.times[first:], self.mb[first:]).slope
        return slope, statistics.median_high(self.files[-5:]) - statistics.median_low(self.files[first : first + 5])


async def sample(rig: Rig, growth: dict[str, Growth]) -> None:
    """Of those that nobody kills: the router, the kvstore, the supervisor."""
    while True:
        for name, pid in (
            *((member, rig.service(member).pid) for member in ("router", "kvstore")),
            ("supervisor", rig.stack.supervisor_pid),
        ):
            process = psutil.Process(pid)
            growth.setdefault(name, Growth()).add(process.memory_info().rss / 1e6, process.num_fds())
        await asyncio.sleep(SAMPLE_S)


async def test_soak(seed: int) -> None:
    seconds = float(os.environ.get("QUIRE_SOAK_MINUTES", "3")) * 60
    async with Rig("paced 20") as rig:
        load = Load(rig, STREAMS, seed)
        await load.learn(make_scripts(24, seed, 20, 250))
        saboteur, rng, growth = Saboteur(rig, load, seed), random.Random(seed), dict[str, Growth]()
        sampling = asyncio.create_task(sample(rig, growth))
        load.start()
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            await (saboteur.freeze(1) if rng.random() < 0.25 else saboteur.kill(1))
        await load.finish()
        sampling.cancel()
        print(f"{load.answers} answers, {load.tokens} tokens, {len(load.failures)} bad\n{saboteur.summary()}")
        assert_unharmed(load, saboteur)
        await rig.wait_whole()
        rig.wait_pages_back()
        for name, grown in growth.items():
            slope, files = grown.settled()
            print(f"{name}: {grown.mb[0]:.0f} to {grown.mb[-1]:.0f} MB, {slope:+.2f} MB a minute, {files:+d} files")
            assert slope <= MOST_MB_PER_MINUTE
            assert files <= MOST_FILES
