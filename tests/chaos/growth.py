"""Growth: memory and files of every process of a stack over its life, and how fast they grow once it is warm."""

from __future__ import annotations

import asyncio
import statistics
import time
from dataclasses import dataclass, field

import psutil

from tests.chaos.rig import Rig

SAMPLE_S = 2.0
# Of a life, the first part: caches fill and pools open.
WARM_SHARE = 0.4
# A shorter life says nothing.
LEAST_LIFE_S = 45.0
# How fast memory may grow, beside what comes and goes.
MOST_MB_PER_HOUR, NOISE_MB = 60.0, 3.0
MOST_FILES = 24


@dataclass
class Life:
    """One process's."""

    member: str
    times: list[float] = field(default_factory=list)
    mb: list[float] = field(default_factory=list)
    files: list[int] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return self.times[-1] - self.times[0]

    @property
    def warm(self) -> slice:
        return slice(int(len(self.times) * WARM_SHARE), None)

    @property
    def mb_per_hour(self) -> float:
        hours = [moment / 3600 for moment in self.times[self.warm]]
        return statistics.linear_regression(hours, self.mb[self.warm]).slope

    @property
    def warm_hours(self) -> float:
        times = self.times[self.warm]
        return (times[-1] - times[0]) / 3600

    @property
    def more_files(self) -> int:
        files = self.files[self.warm]
        return statistics.median_high(files[-5:]) - statistics.median_low(files[:5])

    @property
    def grows(self) -> bool:
        """Faster than it may."""
        too_fast = self.mb_per_hour * self.warm_hours > NOISE_MB + MOST_MB_PER_HOUR * self.warm_hours
        return too_fast or self.more_files > MOST_FILES

    def __str__(self) -> str:
        return (
            f"{self.member}: {self.seconds:.0f} s, {self.mb[0]:.0f} to {self.mb[-1]:.0f} MB, "
            f"{self.mb_per_hour:+.1f} MB/h, {self.more_files:+d} files"
        )


class Growth:
    """Of all processes; `watch` is to be a task."""

    def __init__(self, rig: Rig) -> None:
        self._rig = rig
        self._lives: dict[tuple[str, int], Life] = {}

    async def watch(self) -> None:
        while True:
            pids = {member: self._rig.service(member).pid for member in self._rig.members}
            for name, pid in {**pids, "supervisor": self._rig.stack.supervisor_pid}.items():
                self._sample(name, pid)
            await asyncio.sleep(SAMPLE_S)

    def longest(self) -> list[Life]:
        """Of every member, the longest life."""
        by_member: dict[str, Life] = {}
        for life in self._lives.values():
            best = by_member.setdefault(life.member, life)
            if life.seconds > best.seconds:
                by_member[life.member] = life
        return list(by_member.values())

    def _sample(self, member: str, pid: int) -> None:
        try:
            process = psutil.Process(pid)
            mb, files = process.memory_info().rss / 1e6, process.num_fds()
        except psutil.Error:
            return  # it was killed
        life = self._lives.setdefault((member, pid), Life(member))
        life.times.append(time.monotonic())
        life.mb.append(mb)
        life.files.append(files)
