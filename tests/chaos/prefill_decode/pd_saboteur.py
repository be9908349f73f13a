"""PdSaboteur: kills and freezes prefill and decode replicas, spoils what passes between them, and parts them."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter

from quire.local.spec import replica_of, service_of
from tests.chaos.faults import Saboteur
from tests.chaos.load import Load
from tests.chaos.prefill_decode.partition import partition
from tests.chaos.prefill_decode.pd_rig import PdRig

# What happens to pages on their way; `cut`: all connections end.
_RELAY_MODES = ("flip", "silent", "slow", "garbage", "cut")


class PdSaboteur(Saboteur):
    """Its choices depend on the seed alone. Freezes, spoilt ways and partitions last while other faults come."""

    def __init__(self, rig: PdRig, load: Load, seed: int) -> None:
        super().__init__(rig, load, seed)
        self.kinds: Counter[str] = Counter()
        self._pd = rig
        self._rng = random.Random(seed)
        self._members = [name for name in rig.members if service_of(name) in ("scheduler", "worker")]
        self._parted = False

    async def disturb(self, count: int, seconds: float) -> None:
        """So many faults, or what comes in so many seconds."""
        began = time.monotonic()
        async with asyncio.TaskGroup() as lasting:
            while sum(self.kinds.values()) < count and time.monotonic() - began < seconds:
                await self._pause(0.2, 1.2)
                kind = self._rng.choices(("kill", "freeze", "way", "part"), (45, 15, 30, 10))[0]
                if kind == "kill":
                    self.kinds["killed"] += 1
                    await self.strike(self._rng.choice(self._members))
                elif kind == "freeze":
                    self.kinds["frozen"] += 1
                    lasting.create_task(self.strike(self._rng.choice(self._members), self._rng.uniform(2.5, 4.0)))
                elif kind == "part" and self._pd.network is not None and not self._parted:
                    self.kinds["pools parted"] += 1
                    lasting.create_task(self._part(self._rng.uniform(0.5, 4.0)))
                elif self._pd.relays:
                    lasting.create_task(self._spoil(self._rng.choice(_RELAY_MODES), self._rng.uniform(0.3, 2.0)))

    async def _spoil(self, mode: str, seconds: float) -> None:
        """One worker's way out."""
        name = self._rng.choice(list(self._pd.relays))
        relay = self._pd.relays[name]
        self.kinds[f"pages {mode}"] += 1
        print(f"{self._load.at()}: pages of {name}: {mode}", flush=True)
        if mode == "cut":
            relay.hang_up()
            return
        with self._pd.relayed_as(mode, name):
            await asyncio.sleep(seconds)

    async def _part(self, seconds: float) -> None:
        """Workers of the two pools hear nothing of each other."""
        network, self._parted = self._pd.network, True
        assert network is not None
        sides = [self._pd.of_role("worker", role) for role in ("prefill", "decode")]
        print(f"{self._load.at()}: pools parted for {seconds:.1f} s", flush=True)
        with partition(network, *sides), self._pd.relayed_as("silent"):
            await asyncio.sleep(seconds)
        self._parted = False

    def _others(self, service: str, own: str, healthy: set[str]) -> bool:
        """Any other replica will do, whatever its role."""
        others = [name for name in self._pd.stack.spec.members_of(service) if name != own and name in healthy]
        return any(all(map(self._pd.serves, replica_of(name))) for name in others)
