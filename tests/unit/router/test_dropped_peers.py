"""The fleet, the tokenizer pool and the page watchers wait at their end for the peers that they dropped before, and
close the channel of each peer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import grpc
import pytest

from quire_common.discovery import Endpoint
from quire_router.config import RouterConfig
from quire_router.pages.page_directory import PageDirectory
from quire_router.pages.page_stream import PageStream
from quire_router.pages.page_watchers import PageWatchers
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


async def pass_turns(turns: int) -> None:
    """Let the event loop run this many turns."""
    for _ in range(turns):
        await asyncio.sleep(0)


async def run_until_cancelled(name: str, ended: list[str], turns: int) -> None:
    """Stand for the task of a peer. Its cleanup, as the close of a channel, takes some turns of the loop; then add its
    name to `ended`."""
    try:
        await asyncio.Event().wait()
    finally:
        await pass_turns(turns)
        ended.append(name)


@pytest.mark.parametrize("turns", [0, 1, 5])
@pytest.mark.parametrize("make", [make_fleet, make_pool])
async def test_close_waits_for_peers_that_were_dropped(
    make: Callable[[], Fleet | TokenizerPool], turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []

    async def run(peer: Replica | TokenizerLink) -> None:
        await run_until_cancelled(peer.instance, ended, 50 if peer.instance == "dropped" else 0)

    monkeypatch.setattr(Replica, "run", run)
    monkeypatch.setattr(TokenizerLink, "run", run)
    peers = make()
    peers.update([Endpoint("dropped", "service", "127.0.0.1:1"), Endpoint("kept", "service", "127.0.0.1:2")])
    await asyncio.sleep(0)
    peers.update([Endpoint("kept", "service", "127.0.0.1:2")])
    await pass_turns(turns)
    await peers.close()
    assert sorted(ended) == ["dropped", "kept"]


@pytest.mark.parametrize("turns", [0, 1, 5])
async def test_close_waits_for_page_streams_that_were_dropped(turns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[str] = []

    async def run(stream: PageStream) -> None:
        await run_until_cancelled(stream.address, ended, 50 if stream.address == "127.0.0.1:1" else 0)

    monkeypatch.setattr(PageStream, "run", run)
    watchers = PageWatchers(RouterConfig(), PageDirectory(1024, 1.0), lambda service, instance, number, life: None)
    watchers.update("scheduler", [Endpoint("a", "scheduler", "127.0.0.1:1"), Endpoint("b", "scheduler", "127.0.0.1:2")])
    await asyncio.sleep(0)
    watchers.update("scheduler", [Endpoint("b", "scheduler", "127.0.0.1:2")])
    await pass_turns(turns)
    await watchers.close()
    assert sorted(ended) == ["127.0.0.1:1", "127.0.0.1:2"]


@pytest.mark.parametrize("dropped", [True, False], ids=["dropped", "at the end"])
@pytest.mark.parametrize("make", [make_fleet, make_pool])
async def test_channel_of_a_peer_that_ends_before_its_task_has_begun_is_closed(
    make: Callable[[], Fleet | TokenizerPool], dropped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    probe, closed = grpc.aio.insecure_channel("127.0.0.1:1"), list[grpc.aio.Channel]()
    await probe.close()
    channel_type, close = type(probe), type(probe).close

    async def record_close(channel: grpc.aio.Channel, grace: float | None = None) -> None:
        closed.append(channel)
        await close(channel, grace)

    monkeypatch.setattr(channel_type, "close", record_close)
    peers = make()
    peers.update([Endpoint("peer", "service", "127.0.0.1:1")])
    if dropped:
        peers.update([])
    await peers.close()
    assert len(closed) == 1
