"""A scheduler, a worker and a tokenizer are killed under streams, one is frozen: nobody notices. See tests/chaos."""

from __future__ import annotations

from tests.chaos.faults import Saboteur
from tests.chaos.judge import MOVES, run_chaos
from tests.chaos.rig import Rig

SEED = 5
FROZEN_S = 3.0


async def strike(saboteur: Saboteur) -> None:
    for member in ("scheduler-1", "tokenizer-1", "worker-2"):
        await saboteur.strike(member)
    await saboteur.strike("tokenizer-2", FROZEN_S)


async def test_streams_survive_the_death_of_any_replicated_service() -> None:
    async with Rig("paced 10") as rig:
        await run_chaos(rig, SEED, (40, 160), strike, scripts=9)
        assert (await rig.router_metrics()).get(MOVES, 0) > 0
