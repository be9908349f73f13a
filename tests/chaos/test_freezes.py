"""SIGSTOP of random members, SIGCONT seconds later: what comes back finds its work taken over, and repeats nothing."""

from __future__ import annotations

import pytest

from tests.chaos.judge import assert_detected, faults_wanted, run_chaos
from tests.chaos.rig import Rig

pytestmark = pytest.mark.slow


async def test_streams_survive_freezes_of_paced_replicas(seed: int) -> None:
    async with Rig("paced 20") as rig:
        saboteur = await run_chaos(rig, seed, (40, 250), lambda s: s.freeze(faults_wanted(30)))
        assert_detected(saboteur)


async def test_streams_survive_freezes_of_cpu_replicas(seed: int) -> None:
    async with Rig("cpu") as rig:
        await run_chaos(rig, seed, (20, 80), lambda s: s.freeze(faults_wanted(10)), scripts=12)
