"""One tokenizer: its channel, its calls, and whether it answers."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import TYPE_CHECKING

import grpc

from quire.v1 import tokenizer_pb2 as tb
from quire.v1 import tokenizer_pb2_grpc
from quire_common.channel import aio_channel
from quire_common.columns import i32
from quire_common.telemetry.logs import get_logger
from quire_router.backoff import Backoff

if TYPE_CHECKING:
    from collections.abc import Callable

    from quire_router.config import RouterConfig

_PROBE_TIMEOUT_S = 5.0
log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class TokenizerInfo:
    """What GetTokenizerInfo said."""

    model: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    has_chat_template: bool
    digest: bytes


class TokenizerLink:
    """Probed until it answers, and again whenever a call finds it gone. `changed` is called at both."""

    def __init__(self, instance: str, address: str, config: RouterConfig, changed: Callable[[], None]) -> None:
        self.instance = instance
        self.address = address
        self.info: TokenizerInfo | None = None
        self.healthy = False
        self._channel = aio_channel(address, config)
        self.stub = tokenizer_pb2_grpc.TokenizerStub(self._channel)
        self._changed = changed
        self._suspected = asyncio.Event()

    def suspect(self) -> None:
        """A call found it gone: nobody uses it until it answers a probe."""
        if self.healthy:
            log.warning("tokenizer lost", instance=self.instance)
        self.healthy = False
        self._suspected.set()
        self._changed()

    async def run(self) -> None:
        """Until cancelled."""
        try:
            while True:
                await self._probe()
                self._suspected.clear()
                self.healthy = True
                log.info("tokenizer ready", instance=self.instance)
                self._changed()
                await self._suspected.wait()
        finally:
            await self._channel.close()

    async def _probe(self) -> None:
        backoff = Backoff()
        while True:
            try:
                info = await self.stub.GetTokenizerInfo(tb.GetTokenizerInfoRequest(), timeout=_PROBE_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                log.debug("tokenizer does not answer", instance=self.instance, code=error.code().name)
                await backoff.wait()
                continue
            eos = tuple(i32(info.eos_token_ids, "eos_token_ids").tolist())
            self.info = TokenizerInfo(info.model, info.vocab_size, eos, info.has_chat_template, info.digest)
            return
