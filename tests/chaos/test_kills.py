"""SIGKILL of random schedulers, workers and tokenizers under streams: clients see a pause, and nothing else."""

from __future__ import annotations

import pytest

from tests.chaos.judge import faults_wanted, run_chaos
from tests.chaos.rig import Rig

pytestmark = pytest.mark.slow
# Until the last of the streams went on: what the design wants of detection, and so much for the way back.
DETECTED_S = 3.0


async def test_kills_of_paced_replicas(seed: int) -> None:
    async with Rig("paced 20") as rig:
        saboteur = await run_chaos(rig, seed, (40, 250), lambda s: s.kill(faults_wanted(70)))
        pauses = sorted(saboteur.pauses(("scheduler", "worker", "tokenizer")))
        assert pauses[int(len(pauses) * 0.99)] <= DETECTED_S


async def test_kills_of_cpu_replicas(seed: int) -> None:
    async with Rig("cpu") as rig:
        await run_chaos(rig, seed, (20, 80), lambda s: s.kill(faults_wanted(30)), scripts=12)
