"""Saboteur: kills or freezes random members, one after the other, while the router has another of the kind."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from quire.local.spec import replica_of, service_of
from tests.chaos.load import Load
from tests.chaos.rig import LIMIT_S, POLL_S, Rig

# Faults that a summary names.
_WORST = 5


@dataclass(frozen=True)
class Fault:
    """`seconds`: how long it was frozen; 0: it was killed."""

    member: str
    moment: float
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"{self.member} {f'frozen for {self.seconds:.1f} s' if self.seconds else 'killed'}"


class Saboteur:
    """Its choices depend on the seed alone, their moments on the machine."""

    def __init__(self, rig: Rig, load: Load, seed: int) -> None:
        self.faults: list[Fault] = []
        self._rig = rig
        self._load = load
        self._rng = random.Random(seed)
        services = ("scheduler", "worker", "tokenizer")
        self._targets = [member for member in rig.members if service_of(member) in services]

    async def kill(self, count: int) -> None:
        """SIGKILL; the supervisor starts another."""
        for _ in range(count):
            await self._pause(0.3, 2.0)
            await self.strike(self._rng.choice(self._targets))

    async def freeze(self, count: int) -> None:
        """SIGSTOP, and SIGCONT when everybody has given it up."""
        for _ in range(count):
            await self._pause(0.3, 1.5)
            await self.strike(self._rng.choice(self._targets), self._rng.uniform(3.0, 6.0))

    async def strike(self, member: str, seconds: float = 0.0) -> None:
        """Kill it, or freeze it for some seconds, as soon as another could take over."""
        await self._wait_spare(member)
        while not (process := self._rig.service(member).process).signal(signal.SIGSTOP if seconds else signal.SIGKILL):
            # Another fault had waited for the same moment, and came first.
            await asyncio.sleep(POLL_S)
            await self._wait_spare(member)
        fault = Fault(member, time.monotonic(), seconds)
        self.faults.append(fault)
        print(f"{self._load.at(fault.moment)}: {len(self.faults)}. {fault}", flush=True)
        if seconds:
            try:
                await asyncio.sleep(seconds)
            finally:
                process.signal(signal.SIGCONT)

    def pauses(self, services: Sequence[str]) -> list[float]:
        """Of the faults at these services."""
        return [self.pause(fault) for fault in self.faults if service_of(fault.member) in services]

    def pause(self, fault: Fault) -> float:
        """Until the stream that waited the longest for something went on."""
        return max(ticks.pause_after(fault.moment) for ticks in self._load.ticks)

    def summary(self) -> str:
        """Counts and pauses, for the log."""
        counts = Counter(service_of(fault.member) for fault in self.faults)
        lines = [f"{len(self.faults)} faults: {dict(counts)}"]
        for services in (("scheduler", "worker"), ("tokenizer",)):
            pauses = sorted(self.pauses(services))
            if pauses:
                p50, p99 = pauses[len(pauses) // 2], pauses[min(len(pauses) - 1, int(len(pauses) * 0.99))]
                lines.append(f"  until all streams went on, {' or '.join(services)}: p50 {p50:.2f} s, p99 {p99:.2f} s")
        worst = sorted(self.faults, key=self.pause)[-_WORST:]
        lines += [f"  {self._load.at(fault.moment)}: {fault}: {self.pause(fault):.2f} s" for fault in reversed(worst)]
        return "\n".join(lines)

    async def _wait_spare(self, member: str) -> None:
        """Until it serves, and one of the kind that could take over does too, also in the router's eyes."""
        service = service_of(member)
        seen = "tokenizer" if service == "tokenizer" else "scheduler"
        own = member if service == "tokenizer" else replica_of(member)[0]
        deadline = time.monotonic() + LIMIT_S
        while not (self._rig.serves(member) and self._others(seen, own, await self._rig.healthy())):
            assert time.monotonic() < deadline, f"nobody could take over from {member}: {self._rig.state().services}"
            await asyncio.sleep(POLL_S)

    def _others(self, service: str, own: str, healthy: set[str]) -> bool:
        """A replica is whole only with its worker, of which the router may not have heard yet."""
        others = [name for name in self._rig.stack.spec.members_of(service) if name != own and name in healthy]
        return any(
            all(map(self._rig.serves, replica_of(name) if service == "scheduler" else (name,))) for name in others
        )

    async def _pause(self, least_s: float, most_s: float) -> None:
        await asyncio.sleep(self._rng.uniform(least_s, most_s))
