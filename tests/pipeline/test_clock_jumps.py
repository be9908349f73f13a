"""Clocks of all five services jump ahead by hours, days and weeks, while nothing runs and while much does."""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path

import pytest

from tests.chaos.judge import STREAMS
from tests.chaos.load import Load
from tests.chaos.rig import Rig
from tests.chaos.scripts import make_scripts
from tests.pipeline.clock_file import HOUR_S, ClockFile
from tests.tiers import deep_after

# Where microseconds and milliseconds leave 31 and 32 bits, and then some.
JUMPS_H = (1.3, 0.7, 40.0, 24 * 25.0, 24 * 50.0, 24 * 365.0)
PROMPT = "The clock strikes one, and nobody has asked for anything since it struck twelve."


@pytest.mark.parametrize("engine", deep_after(1, ["paced 5", "cpu"]))
async def test_request_after_a_clock_jump_is_answered(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ClockFile(tmp_path / "clock", monkeypatch)
    async with Rig(engine, replicas=1, tokenizers=1) as rig:

        async def answer() -> str:
            body = {"model": "", "prompt": PROMPT, "max_tokens": 12, "temperature": 0}
            response = await rig.http.post("/v1/completions", json=body)
            assert response.status_code == 200, response.text
            text: str = response.json()["choices"][0]["text"]
            return text

        wanted = await answer()
        processes = {member: rig.service(member).process.pid for member in rig.members}
        for hours in JUMPS_H:
            clock.jump(hours * HOUR_S)
            assert await answer() == wanted, f"after {hours} hours"
            await asyncio.sleep(1.0)
            assert await answer() == wanted
        assert {member: rig.service(member).process.pid for member in rig.members} == processes, "a process ended"
        moved = await rig.router_counts("quire_router_migrations_total")
        assert not moved.get("worker_lost"), f"the worker's run was lost: {moved}"


@pytest.mark.slow
async def test_soak_of_clock_jumps_harms_no_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CLOCK_JUMPS of them (40), under load."""
    rng, jumps = random.Random(7), int(os.environ.get("CLOCK_JUMPS", "40"))
    clock = ClockFile(tmp_path / "clock", monkeypatch)
    # A request's own time limit passes with the clock.
    flags: dict[str, dict[str, str | bool]] = {"router": {"request-timeout-s": "0"}}
    async with Rig("paced 20", flags=flags) as rig:
        load = Load(rig, STREAMS, 7)
        await load.learn(make_scripts(12, 7, 20, 250))
        load.start()
        for _ in range(jumps):
            await asyncio.sleep(rng.uniform(0.5, 3.0))
            clock.jump(rng.uniform(0.5, 100.0) * HOUR_S)
        await load.finish()
        print(f"{load.answers} answers, {load.tokens} tokens, {jumps} jumps, {len(load.failures)} bad")
        assert load.answers > 0
        assert load.failures == []
        await asyncio.to_thread(rig.wait_pages_back)
