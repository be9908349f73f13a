"""A worker that breaks from within, at a step of its own: the other replica takes its streams, whenever it happens."""

from __future__ import annotations

import asyncio

import pytest

from tests.chaos.judge import MOVES, STREAMS
from tests.chaos.load import Load
from tests.chaos.rig import Rig
from tests.chaos.scripts import make_scripts

pytestmark = pytest.mark.slow
SECONDS = 12.0
STEP = 250
# More than one, since a step may have no logits to spoil, or the stream that it hits may just have been left.
NANS = ",".join(f"nan@{step}" for step in range(STEP, 2 * STEP, 50))


@pytest.mark.parametrize("fault", [f"die@{STEP}", f"hang@{STEP}", f"silent@{STEP}", f"wrong-epoch@{STEP}", NANS])
async def test_streams_survive_worker_faults(seed: int, fault: str) -> None:
    flags = {"worker-1": {"paced-fault": fault}, "scheduler": {"worker-timeout-s": "2"}}
    async with Rig("paced 10", flags=flags) as rig:
        load = Load(rig, STREAMS, seed)
        await load.learn(make_scripts(12, seed, 20, 120))
        load.start()
        await asyncio.sleep(SECONDS)
        await load.finish()
        metrics = await rig.router_metrics()
        moved = metrics.get(MOVES, 0)
        print(f"{load.answers} answers, {len(load.failures)} bad, {moved:.0f} moves, deaths {rig.stack.deaths}")
        assert not load.failures, "\n".join(load.failures[:20])
        assert load.answers >= STREAMS
        assert moved > 0
        # A NaN costs sequences, not the worker: nothing of theirs may stay there either.
        rig.wait_pages_back(schedulers=() if fault == NANS else ("scheduler-2",))
