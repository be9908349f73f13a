"""Minutes of conversations and faults: every token is right, nothing is kept, and nothing grows.

SOAK_SECONDS: how long; 600 unless said. Conversations share their beginnings, and their pages leave the devices for the
kvstore's memory, disk and Redis. Members of the first replica are hit in the first half, those of the second one in the
second, when the kvstore is not killed either: so each has a life that is long enough to see whether it grows. Beside
them run canaries: requests of which each has a mark and an answer of its own, which no other request may get.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from pathlib import Path

import pytest

from tests.chaos.canaries import Canaries, asking
from tests.chaos.faults import Saboteur
from tests.chaos.growth import LEAST_LIFE_S, Growth
from tests.chaos.judge import STREAMS, assert_unharmed
from tests.chaos.kv.tier_saboteur import TierSaboteur
from tests.chaos.load import Load
from tests.chaos.rig import Rig
from tests.chaos.scripts import make_conversations, make_scripts, with_constraints
from tests.redis_proxy import RedisProxy
from tests.redis_server import RedisServer, redis_server

__all__ = ["redis_server"]
pytestmark = pytest.mark.slow
# Pages of a device: fewer than the conversations have.
_DEVICE_PAGES = "250"
# Streams of requests of which each has a mark of its own.
CANARIES = 4
# A shorter soak may not get to the bottom of the tiers.
_LONG_S = 300
# Of the kvstore's memory and disk: a hundred, and a hundred and fifty of the paced worker's pages.
_RAM_BYTES, _DISK_BYTES = str(100 * 1024), str(150 * 4096)


def flags(folder: Path, redis_url: str) -> dict[str, dict[str, str | bool]]:
    kvstore: dict[str, str | bool] = {
        "ram-bytes": _RAM_BYTES,
        "disk-path": str(folder),
        "disk-bytes": _DISK_BYTES,
        "disk-keep-free-bytes": "0",
        "redis-url": redis_url,
        "redis-ttl-s": "60",
        "redis-timeout-ms": "200",
        "redis-retry-s": "0.3",
        "disk-policy": "arc",
    }
    return {"kvstore": kvstore, "worker": {"paced-pages": _DEVICE_PAGES}, "scheduler": {"kvstore-timeout-ms": "500"}}


async def disturb(rig: Rig, saboteur: Saboteur, tiers: TierSaboteur, seed: int, seconds: float) -> None:
    """Fault after fault, for so long."""
    rng, began = random.Random(seed), time.monotonic()
    while (passed := time.monotonic() - began) < seconds:
        half = 1 if passed < seconds / 2 else 2
        if rng.random() < 0.5:
            await tiers.strike(kill=half == 1)
            await asyncio.sleep(rng.uniform(0.0, 1.0))
            continue
        member = f"{rng.choice(('scheduler', 'worker', 'tokenizer'))}-{half}"
        await asyncio.sleep(rng.uniform(0.3, 2.0))
        await saboteur.strike(member, rng.uniform(3.0, 6.0) if rng.random() < 0.25 else 0.0)


async def test_soak_of_random_faults_leaks_nothing(seed: int, tmp_path: Path, redis_server: RedisServer) -> None:
    seconds = float(os.environ.get("SOAK_SECONDS", "600"))
    folder = tmp_path / "pages"
    with RedisProxy(redis_server.port) as proxy:
        async with Rig("paced 20", flags=flags(folder, proxy.url)) as rig:
            load = Load(rig, STREAMS, seed)
            await load.learn(
                [*make_conversations(10, 4, seed, 20, 120), *with_constraints(make_scripts(12, seed, 20, 250))]
            )
            saboteur, tiers = Saboteur(rig, load, seed), TierSaboteur(rig, folder, redis_server, proxy, seed)
            growth = Growth(rig)
            watching = [asyncio.create_task(growth.watch()), asyncio.create_task(tiers.look())]
            canaries = Canaries(rig.stack.grpc, CANARIES, seed)
            load.start()
            async with asking(canaries):
                await disturb(rig, saboteur, tiers, seed, seconds)
            await load.finish()
            print(f"{canaries.answered} canaries answered, {len(canaries.crossed)} crossed")
            assert not canaries.errors, "\n".join(canaries.errors[:20])
            assert not canaries.crossed, "\n".join(canaries.crossed[:20])
            assert canaries.answered >= seconds
            print(f"{load.answers} answers, {load.tokens} tokens, {len(load.failures)} bad\n{saboteur.summary()}")
            print(f"of the kvstore: {dict(tiers.faults)}")
            assert_unharmed(load, saboteur)
            await rig.wait_whole()
            await asyncio.to_thread(rig.wait_pages_back)
            await tiers.wait_at_rest()
            for task in watching:
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
            for medium, counts in tiers.totals().items():
                print(f"{medium}: {dict(counts)}")
                assert counts["hits"] or seconds < _LONG_S, f"nothing came from {medium}"
            lives = growth.longest()
            print("\n".join(map(str, lives)), flush=True)
            assert not [str(life) for life in lives if life.seconds >= LEAST_LIFE_S and life.grows]
