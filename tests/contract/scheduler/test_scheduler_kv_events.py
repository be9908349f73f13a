"""A consumer of vLLM's events at a scheduler that serves."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from quire_common.columns import pack_i32
from quire_common.pages import chain_hashes
from quire_scheduler.service.kv_events.zmq_publisher import ZmqPublisher
from tests.fakes.scheduler.kv_subscriber import AllBlocksCleared, BlockRemoved, BlockStored, Subscriber
from tests.fakes.scheduler.scheduler_rig import a_sequence
from tests.fakes.scheduler.scheduler_stack import Router, stack

OPTION = {
    "enable_kv_cache_events": True,
    "publisher": "zmq",
    "endpoint": "tcp://127.0.0.1:*",
    "replay_endpoint": "tcp://127.0.0.1:*",
    "topic": "kv@engine@model",
}


async def test_kv_event_consumer_learns_the_engines_pages() -> None:
    option: dict[str, Any] = {"kv_events_config": json.dumps(OPTION), "enable_prefix_caching": True}
    async with stack(page_size=4, max_model_len=256, num_pages=12, **option) as s:
        pump = s.service.kv_events
        assert pump is not None and isinstance(pump._publisher, ZmqPublisher)
        endpoints = (pump._publisher.endpoint, pump._publisher.replay_endpoint)
        subscriber = Subscriber(*endpoints, "kv@engine@model")
        held: dict[bytes | int, BlockStored] = {}
        try:
            router = Router(s)
            await router.open()
            await router.submit({1: a_sequence(10, 6)})
            await router.done(1)
            # What came before the subscription is to be had as well: from the first number on.
            seen = -1

            async def caught_up() -> None:
                nonlocal seen
                for number, batch in await asyncio.to_thread(subscriber.replay, seen + 1):
                    assert number == seen + 1
                    seen = number
                    for event in batch.events:
                        if isinstance(event, BlockStored):
                            held.update(dict.fromkeys(event.block_hashes, event))
                        elif isinstance(event, BlockRemoved):
                            for digest in event.block_hashes:
                                del held[digest]
                        elif isinstance(event, AllBlocksCleared):
                            held.clear()

            def low(digests: list[bytes]) -> set[int]:
                return {int.from_bytes(digest[-8:], "big") for digest in digests}

            def truth() -> set[int]:
                return low(list(s.core.names.pages(0)))

            async with asyncio.timeout(60):
                while not held or set(held) != truth():
                    await caught_up()
            prompt = a_sequence(10).prompt_ids
            hashes = chain_hashes(prompt, 4)
            assert low(hashes) <= set(held)
            first = held[min(low(hashes[:1]))]
            assert first.parent_block_hash is None and first.block_size == 4 and first.medium == "GPU"
            assert pack_i32(first.token_ids[:8]) == pack_i32(prompt[:8])
            # Another prompt takes all pages: evictions are told too.
            await router.submit({2: a_sequence(36, 6, cache_salt="other")})
            await router.done(2)
            async with asyncio.timeout(60):
                while set(held) != truth() or low(hashes) & set(held):
                    await caught_up()
        finally:
            subscriber.close()
