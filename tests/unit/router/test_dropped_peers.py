"""The fleet and the tokenizer pool wait at their end for the peers that they dropped before."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from quire_common.discovery import Endpoint
from quire_router.config import RouterConfig
from quire_router.replicas.fleet import Fleet
from quire_router.replicas.replica import Replica
from quire_router.text.detokenize_stream import DetokenizeStream
from quire_router.text.tokenizer_link import TokenizerLink
from quire_router.text.tokenizer_pool import TokenizerPool
from quire_router.watchdog import Watchdog


def make_fleet() -> Fleet:
    config, watchdog = RouterConfig(), Watchdog(60.0)
    pool = TokenizerPool(config, lambda: None)
    return Fleet(
        config,
        lambda sequences, failed: DetokenizeStream(pool, watchdog, config, sequences, failed),
        "router",
        watchdog,
        lambda sequence, failure: None,
        lambda: None,
    )


def make_pool() -> TokenizerPool:
    return TokenizerPool(RouterConfig(), lambda: None)


@pytest.mark.parametrize("make", [make_fleet, make_pool])
async def test_close_waits_for_peers_that_were_dropped(
    make: Callable[[], Fleet | TokenizerPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []

    async def run(peer: Replica | TokenizerLink) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            # The close of a channel takes some turns of the loop.
            for _ in range(50 if peer.instance == "dropped" else 0):
                await asyncio.sleep(0)
            ended.append(peer.instance)

    monkeypatch.setattr(Replica, "run", run)
    monkeypatch.setattr(TokenizerLink, "run", run)
    peers = make()
    peers.update([Endpoint("dropped", "service", "127.0.0.1:1"), Endpoint("kept", "service", "127.0.0.1:2")])
    await asyncio.sleep(0)
    peers.update([Endpoint("kept", "service", "127.0.0.1:2")])
    await peers.close()
    assert sorted(ended) == ["dropped", "kept"]
