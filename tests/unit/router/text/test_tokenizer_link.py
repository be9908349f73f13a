"""A tokenizer whose info cannot be read is probed again."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from grpc_health.v1 import health_pb2

from quire.v1 import tokenizer_pb2 as tb
from quire_common.columns import pack_i32
from quire_router.config import RouterConfig
from quire_router.text.tokenizer_link import TokenizerLink


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
