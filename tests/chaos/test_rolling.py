"""A rolling restart of everything but the router, under streams: nobody notices, however short the time to drain."""

from __future__ import annotations

import asyncio

import pytest

from quire.local.rolling import Rolling, rolling_turns
from tests.chaos.judge import STREAMS
from tests.chaos.load import Load
from tests.chaos.rig import LIMIT_S, Rig
from tests.chaos.scripts import make_scripts, with_constraints

pytestmark = pytest.mark.slow
ROUNDS = 2


@pytest.mark.parametrize(
    ("engine", "lengths", "drain_s"),
    [("paced 20", (40, 250), 20.0), ("paced 20", (40, 250), 0.5), ("cpu", (20, 80), 20.0), ("cpu", (20, 80), 0.5)],
)
async def test_streams_survive_a_rolling_restart(
    seed: int, engine: str, lengths: tuple[int, int], drain_s: float
) -> None:
    """With half a second to drain, most answers must move."""
    async with Rig(engine, drain_timeout_s=drain_s) as rig:
        load = Load(rig, STREAMS, seed)
        await load.learn(with_constraints(make_scripts(12, seed, *lengths)))
        before = rig.state()
        rolling = Rolling(rig.stack.directory, LIMIT_S, lambda line: print(f"{load.at()}: {line}", flush=True))
        load.start()
        for _ in range(ROUNDS):
            await asyncio.to_thread(rolling.run, rolling_turns(before))
        await load.finish()
        print(f"{load.answers} answers, {len(load.failures)} bad")
        assert not load.failures, "\n".join(load.failures[:20])
        assert load.answers >= STREAMS
        await rig.wait_whole()
        rig.wait_pages_back()
        restarts = {name: service.restarts for name, service in rig.state().services.items()}
        assert restarts == {name: ROUNDS * (name != "router") for name in before.services}
        assert rig.stack.deaths == []
