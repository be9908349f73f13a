"""SIGKILL of random schedulers, workers and tokenizers under streams: clients see a pause, and nothing else."""

from __future__ import annotations

import pytest

from tests.chaos.judge import assert_detected, faults_wanted, run_chaos
from tests.chaos.rig import Rig

pytestmark = pytest.mark.slow


async def test_streams_survive_kills_of_paced_replicas(seed: int) -> None:
    async with Rig("paced 20") as rig:
        saboteur = await run_chaos(rig, seed, (40, 250), lambda s: s.kill(faults_wanted(70)))
        assert_detected(saboteur)


async def test_streams_survive_kills_of_cpu_replicas(seed: int) -> None:
    async with Rig("cpu") as rig:
        await run_chaos(rig, seed, (20, 80), lambda s: s.kill(faults_wanted(30)), scripts=12)
