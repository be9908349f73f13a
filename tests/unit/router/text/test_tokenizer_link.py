"""A tokenizer whose answers cannot be read is probed again."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from grpc_health.v1 import health_pb2

from quire.v1 import tokenizer_pb2 as tb
from quire_common.columns import pack_i32
from quire_router.config import RouterConfig
from quire_router.text import tokenizer_link
from quire_router.text.tokenizer_link import TokenizerLink


class Backoff:
    async def wait(self) -> None:
        await asyncio.sleep(0)


class Health:
    """A health service that serves, and whose first answer cannot be parsed: gRPC makes None of it."""

    def __init__(self) -> None:
        self.checks = 0

    async def Check(self, request: Any, timeout: float) -> health_pb2.HealthCheckResponse | None:
        self.checks += 1
        if self.checks == 1:
            return None
        return health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)

    def Watch(self, request: Any) -> WatchCall:
        return WatchCall()


class WatchCall:
    async def __aiter__(self) -> AsyncIterator[None]:
        yield None

    def cancel(self) -> None: ...


async def test_answers_that_cannot_be_parsed_do_not_end_the_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokenizer_link, "Backoff", Backoff)
    infos = [tb.GetTokenizerInfoResponse(model="m"), None]

    async def get_info(request: Any, timeout: float) -> tb.GetTokenizerInfoResponse | None:
        return infos.pop()

    link = TokenizerLink("tokenizer-1", "127.0.0.1:1", RouterConfig(), lambda: None)
    fakes: Any = Health(), SimpleNamespace(GetTokenizerInfo=get_info)
    link._health, link.stub = fakes
    try:
        await link._probe()
        assert link.info is not None and link.info.model == "m"
        assert not infos
    finally:
        await link._channel.close()


async def test_health_that_cannot_be_parsed_is_a_loss() -> None:
    link = TokenizerLink("tokenizer-1", "127.0.0.1:1", RouterConfig(), lambda: None)
    health: Any = Health()
    link._health = health
    try:
        await link._wait_while_serving()
    finally:
        await link._channel.close()


async def test_a_malformed_info_does_not_end_the_probes() -> None:
    infos = [
        tb.GetTokenizerInfoResponse(eos_token_ids=pack_i32([2])),
        tb.GetTokenizerInfoResponse(eos_token_ids=b"abc"),
    ]

    async def check(request: Any, timeout: float) -> health_pb2.HealthCheckResponse:
        return health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)

    async def get_info(request: Any, timeout: float) -> tb.GetTokenizerInfoResponse:
        return infos.pop()

    link = TokenizerLink("tokenizer-1", "127.0.0.1:1", RouterConfig(), lambda: None)
    fakes: Any = SimpleNamespace(Check=check), SimpleNamespace(GetTokenizerInfo=get_info)
    link._health, link.stub = fakes
    try:
        await link._probe()
        assert link.info is not None and link.info.eos_token_ids == (2,)
        assert not infos
    finally:
        await link._channel.close()
