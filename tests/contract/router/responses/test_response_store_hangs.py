"""A Redis that hangs holds up no answer that is to be kept, and loses none: writes go on, in their order."""

from __future__ import annotations

import asyncio
import time

from quire_common.telemetry import metrics
from quire_router.front.http.responses.store import MOST_WAIT_S, RedisStore
from tests.redis_server import RedisServer, redis_server

__all__ = ["redis_server"]
LIMIT_S = 30.0


async def test_hanging_redis_holds_up_no_answer_and_loses_no_response(redis_server: RedisServer) -> None:
    store = RedisStore(redis_server.url, 1 << 20, 60.0)
    await store.put("t", "warm", b"1")
    redis_server.freeze()
    began = time.monotonic()
    await store.put("t", "one", b"in progress")
    await store.put("t", "one", b"done")
    assert time.monotonic() - began < 2 * MOST_WAIT_S + 0.2
    read = asyncio.ensure_future(store.get("t", "one"))
    await asyncio.sleep(0.2)
    assert not read.done()
    redis_server.thaw()
    assert await asyncio.wait_for(read, LIMIT_S) == b"done"
    await store.close()


async def test_writes_under_way_are_bounded(redis_server: RedisServer) -> None:
    store = RedisStore(redis_server.url, 100, 60.0)
    redis_server.freeze()
    dropped = _dropped()
    for number in range(4):
        await store.put("t", str(number), bytes(40))
    assert _dropped() - dropped == 2
    redis_server.thaw()
    assert [await store.get("t", str(number)) is not None for number in range(4)] == [True, True, False, False]
    await store.put("t", "later", bytes(90))
    assert await store.get("t", "later") == bytes(90)
    await store.close()


def _dropped() -> float:
    lines = metrics.render().decode().splitlines()
    found = [line for line in lines if line.startswith('quire_router_responses_dropped_total{reason="no_room"}')]
    return float(found[0].rpartition(" ")[2]) if found else 0.0
