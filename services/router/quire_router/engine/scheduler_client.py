"""A scheduler's calls, but for the session: load and model, as plain values."""

from __future__ import annotations

from typing import TYPE_CHECKING

from quire.v1 import scheduler_pb2 as sb
from quire.v1 import scheduler_pb2_grpc
from quire_common.channel import aio_channel
from quire_common.credit.hello import ModelInfo, model_from_pb
from quire_router.engine.load import Load

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from quire_router.config import RouterConfig

LOAD_INTERVAL_MS = 200
_INFO_TIMEOUT_S = 10.0


class SchedulerClient:
    """One channel. Calls raise grpc.RpcError."""

    def __init__(self, address: str, config: RouterConfig) -> None:
        self._channel = aio_channel(address, config)
        self.stub = scheduler_pb2_grpc.SchedulerStub(self._channel)

    async def watch_load(self) -> AsyncIterator[Load]:
        """Every change of load, until the scheduler ends it."""
        async for message in self.stub.WatchLoad(sb.WatchLoadRequest(interval_ms=LOAD_INTERVAL_MS)):
            yield load_from_pb(message)

    async def model(self) -> ModelInfo:
        """What it runs."""
        response = await self.stub.GetModelInfo(sb.GetModelInfoRequest(), timeout=_INFO_TIMEOUT_S)
        return model_from_pb(response.model)

    async def close(self) -> None:
        """End all calls."""
        await self._channel.close()


def load_from_pb(message: sb.Load) -> Load:
    """Wire to domain."""
    return Load(
        message.phase,
        message.progress,
        message.detail,
        message.running,
        message.waiting,
        max(1, message.max_num_seqs),
    )
