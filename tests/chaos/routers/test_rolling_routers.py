"""A rolling restart of all five services with two routers behind Envoy, under sixteen streams: nobody notices."""

from __future__ import annotations

import asyncio
import signal
from pathlib import Path

import pytest

from quire.local.rolling import Rolling, Turn, rolling_turns
from quire.local.spec import SERVICES, service_of
from tests.chaos.references import References
from tests.chaos.rig import LIMIT_S
from tests.chaos.routers.envoy import PROBE_S
from tests.chaos.scripts import make_conversations
from tests.chaos.table.streams import STREAMS, Streams
from tests.chaos.table.table_rig import SECOND_ROUTER, TableRig
from tests.redis_server import RedisServer, redis_server

__all__ = ["redis_server"]
pytestmark = pytest.mark.slow


async def test_streams_survive_a_rolling_restart_of_all_five_services(
    seed: int, tmp_path: Path, redis_server: RedisServer
) -> None:
    """The router of the stack restarts beside the other services, and the second router after them."""
    async with TableRig(tmp_path, redis_server) as rig:
        await rig.wait_whole()
        references = References()
        scripts = make_conversations(9, 3, seed, 12, 30)
        await references.learn_through(rig.envoy.grpc, rig.envoy.url, scripts)
        before = rig.state()
        turns = [*rolling_turns(before), Turn(("router",))]
        assert {service_of(name) for turn in turns for name in turn.members} == set(SERVICES)
        rolling = Rolling(rig.stack.directory, LIMIT_S, lambda line: print(line, flush=True))
        async with Streams(rig, references, f"rolling {seed}", routers_end=False) as streams:
            await streams.wait_for_answers()
            await asyncio.to_thread(rolling.run, turns)
            await rig.wait_whole()
            assert rig.process(SECOND_ROUTER).signal(signal.SIGTERM)
            while rig.process(SECOND_ROUTER).alive():
                await asyncio.sleep(PROBE_S)
            await rig.wait_whole()
        print(f"{streams.answers} answers, {len(streams.errors)} errors, {len(streams.wrong)} wrong")
        assert not streams.errors + streams.wrong, "\n".join([*streams.errors, *streams.wrong][:20])
        assert streams.answers >= STREAMS
        await rig.back_s()
        restarts = {name: service.restarts for name, service in rig.state().services.items()}
        assert restarts == dict.fromkeys(before.services, 1)
        assert rig.stack.deaths == []
