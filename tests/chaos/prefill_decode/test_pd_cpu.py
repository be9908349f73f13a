"""Prefill and decode replicas on the CPU engine, under load: kills in the middle of transfers, and spoilt pages."""

from __future__ import annotations

import asyncio
import signal

import pytest

from tests.chaos.judge import assert_unharmed
from tests.chaos.load import Load
from tests.chaos.prefill_decode.pd_rig import NO_CACHES, PdRig, flags_of
from tests.chaos.prefill_decode.pd_saboteur import PdSaboteur
from tests.chaos.scripts import make_long_scripts, with_constraints

pytestmark = pytest.mark.slow
STREAMS = 4


async def test_handovers_survive_killed_workers_and_damaged_pages_on_the_cpu_engine(seed: int) -> None:
    async with PdRig("cpu", prefill=1, decode=1, flags=flags_of(0.0, NO_CACHES), relayed=("worker-prefill-1",)) as rig:
        load = Load(rig, STREAMS, seed)
        await load.learn(with_constraints(make_long_scripts(6, seed, 10, 30)))
        load.start()
        for role in ("prefill", "decode"):
            await rig.until_load("prefill", lambda loads: any(load.open_transfers for load in loads))
            assert rig.service(f"worker-{role}-1").process.signal(signal.SIGKILL)
            await rig.wait_whole()
        with rig.relayed_as("flip"):
            await asyncio.sleep(4.0)
        await asyncio.sleep(4.0)
        await load.finish()
        print(f"{load.answers} answers, {load.tokens} tokens, {len(load.failures)} bad")
        assert_unharmed(load, PdSaboteur(rig, load, seed))
        await rig.assert_at_rest()
        assert (await rig.router_counts("quire_router_pd_handoffs_total"))["reserved"] > STREAMS
