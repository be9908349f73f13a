"""Fetches the statistics of the kvstores' tiers, only while a console is open."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc

from quire.v1 import kvstore_pb2 as kb
from quire.v1 import kvstore_pb2_grpc
from quire_common.channel import aio_channel
from quire_common.errors import from_rpc_error
from quire_common.identity.callers import KVSTORE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from quire_common.discovery import Endpoint
    from quire_router.config import RouterConfig

_TIMEOUT_S = 1.5


@dataclass(frozen=True, slots=True)
class Tier:
    """One tier of a kvstore. `capacity_bytes` is 0 if only the backend knows its capacity. Counts are since the
    kvstore's start."""

    medium: str
    pages: int
    used_bytes: int
    capacity_bytes: int
    hits: int
    misses: int
    evictions: int
    corrupt: int
    errors: int
    available: bool


@dataclass(frozen=True, slots=True)
class StoreStats:
    """The last answer of one kvstore. `error`: why the kvstore did not answer; empty: it did."""

    instance: str
    tiers: tuple[Tier, ...] = ()
    leases: int = 0
    error: str = ""


class TierStatsClient:
    """Calls all kvstores of discovery. The first call opens the channels, and `close_channels` closes them."""

    def __init__(self, config: RouterConfig) -> None:
        self.last: list[StoreStats] = []
        self._config = config
        self._endpoints: Sequence[Endpoint] = ()
        self._channels: dict[str, grpc.aio.Channel] = {}

    def update(self, endpoints: Sequence[Endpoint]) -> None:
        """Take discovery's newest list of kvstores."""
        self._endpoints = endpoints

    async def refresh(self) -> None:
        """Ask all kvstores at once for their statistics, and keep the answers, or errors in their place, in `last`.
        Close the channels to kvstores that discovery no longer lists."""
        self.last = list(await asyncio.gather(*map(self._fetch, self._endpoints)))
        addresses = {endpoint.address for endpoint in self._endpoints}
        for address in self._channels.keys() - addresses:
            await self._channels.pop(address).close()

    async def close_channels(self) -> None:
        """Close all channels and forget the answers, since no console is open any more."""
        channels, self._channels, self.last = self._channels, {}, []
        for channel in channels.values():
            await channel.close()

    async def _fetch(self, endpoint: Endpoint) -> StoreStats:
        """Return one kvstore's answer, or the error in its place. Opens its channel at the first call. Waits for at
        most _TIMEOUT_S."""
        channel = self._channels.get(endpoint.address)
        if channel is None:
            channel = self._channels[endpoint.address] = aio_channel(endpoint.address, self._config, KVSTORE)
        try:
            stats = await kvstore_pb2_grpc.KvStoreStub(channel).Stats(kb.StatsRequest(), timeout=_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            return StoreStats(endpoint.instance, error=from_rpc_error(error).message)
        return StoreStats(endpoint.instance, tuple(map(_tier, stats.tiers)), stats.leases)


def _tier(stats: kb.TierStats) -> Tier:
    """Convert a tier's statistics from protobuf."""
    return Tier(
        stats.medium,
        stats.pages,
        stats.bytes,
        stats.capacity_bytes,
        stats.hits,
        stats.misses,
        stats.evictions,
        stats.corrupt,
        stats.errors,
        stats.available,
    )
