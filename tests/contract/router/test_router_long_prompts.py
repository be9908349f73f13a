"""Requests of many long prompts yield the event loop, and leave nothing when their client disconnects."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import numpy as np
import pytest

from quire_router.sequences.job import Caller, GenerateJob, TokenPrompt
from tests.fakes.router.router_faults import nothing_left, until
from tests.fakes.router.router_rig import router_rig
from tests.fakes.scheduler.fake_scheduler import FakeScheduler


async def test_long_prompts_yield_the_event_loop_and_a_disconnect_leaves_nothing() -> None:
    """Placing a prompt names its pages: of 2 million tokens that took the loop 0.2 s at a stretch."""
    async with router_rig([FakeScheduler(max_model_len=70_000, max_num_seqs=8)]) as rig:
        prompts = [[1 + i % 250] * 60_000 for i in range(10)]
        pipeline: Any = rig.router._pipeline
        start, started, turns = pipeline._migration.start, list[float](), 0

        def counted(choices: Any) -> None:
            started.append(turns)
            start(choices)

        async def turning() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        pipeline._migration.start = counted
        turner = asyncio.create_task(turning())
        try:
            assert (await rig.complete(prompts, max_tokens=2)).status_code == 200
            assert len(set(started)) == len(started) == 10
            started.clear()
            job = GenerateJob("", tuple(TokenPrompt(np.array(ids, np.int32)) for ids in prompts), max_tokens=500)
            asked = asyncio.create_task(pipeline.generate(job, Caller("r"), time.monotonic_ns()))
            while len(started) < 4:
                await asyncio.sleep(0)
            asked.cancel()
            with pytest.raises(asyncio.CancelledError):
                await asked
            await until(lambda: nothing_left(rig))
            assert len(started) < 10 and pipeline._admission.inside == 0
        finally:
            turner.cancel()
