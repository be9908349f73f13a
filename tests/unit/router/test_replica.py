"""A replica and the loads that its scheduler reports."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from quire.v1 import scheduler_pb2 as sb
from quire_router.config import RouterConfig
from quire_router.placement.replica_table import ReplicaTable
from quire_router.replicas.replica import Replica
from quire_router.text.detokenize_stream import DetokenizeStream
from quire_router.text.tokenizer_pool import TokenizerPool
from quire_router.watchdog import Watchdog


async def test_load_that_cannot_be_read_makes_the_replica_unreachable_until_the_next() -> None:
    config, watchdog, phases, ready = RouterConfig(), Watchdog(60.0), list[str](), asyncio.Event()
    pool = TokenizerPool(config, lambda: None)
    # gRPC returns None for a message that it cannot parse.
    loads = [None, sb.Load(phase="ready")]

    async def watch_load(request: sb.WatchLoadRequest) -> AsyncIterator[sb.Load | None]:
        yield loads.pop(0)
        await asyncio.Event().wait()

    def changed(replica: Replica) -> None:
        phases.append(replica.load.phase)
        if replica.load.phase == "ready":
            ready.set()

    replica = Replica(
        "scheduler",
        "127.0.0.1:1",
        config,
        lambda sequences, failed: DetokenizeStream(pool, watchdog, config, sequences, failed),
        "router",
        watchdog,
        lambda sequence, failure: None,
        changed,
        ReplicaTable().add("scheduler"),
    )
    replica.client.stub.WatchLoad = watch_load
    task = asyncio.create_task(replica.run())
    try:
        await asyncio.wait_for(ready.wait(), 20)
        assert phases[0] == "unreachable" and not task.done()
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
