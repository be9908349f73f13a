"""A request that fails as it starts gives back all that it took, wherever it fails."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import grpc
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as vb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from quire.v1 import inference_pb2 as ib
from quire_common.telemetry import tracing
from quire_router.requests import pipeline
from quire_router.watchdog import Watchdog
from tests.fakes.router.router_rig import RouterRig, router_rig


def broken(*_: object, **__: object) -> Any:
    raise RuntimeError("broken")


async def until_free(rig: RouterRig) -> None:
    """Wait until the router holds no place and no scheduler runs anything."""
    async with asyncio.timeout(30):
        while rig.router.admission.inside or rig.scheduler.running:
            await asyncio.sleep(0.01)


async def test_a_request_whose_span_cannot_be_started_gives_its_places_back(monkeypatch: pytest.MonkeyPatch) -> None:
    async with router_rig() as rig:
        monkeypatch.setattr(pipeline, "start_span", broken)
        assert (await rig.complete("a", max_tokens=1)).status_code == 500
        assert rig.router.admission.inside == 0


async def test_a_request_that_fails_as_it_is_placed_runs_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    async with router_rig() as rig:
        rig.scheduler.gate.clear()
        real = tracing.span

        def span(name: str, **fields: Any) -> Any:
            return BrokenAtEnd() if name == "router.place" else real(name, **fields)

        monkeypatch.setattr(tracing, "span", span)
        assert (await rig.complete("a", max_tokens=1)).status_code == 500
        await until_free(rig)


class BrokenAtEnd:
    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None:
        broken()


async def test_a_grpc_request_whose_client_cannot_be_watched_gives_its_places_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with router_rig(vllm_grpc=True) as rig, grpc.aio.insecure_channel(rig.grpc_address) as channel:
        rig.scheduler.gate.clear()
        monkeypatch.setattr(Watchdog, "watch", broken)
        smg: Any = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        calls = (
            rig.inference.Generate(ib.GenerateRequest(text="a", max_tokens=1)),
            smg.Generate(vb.GenerateRequest(text="a", sampling_params=vb.SamplingParams(max_tokens=1))),
        )
        for call in calls:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call.read()
            assert caught.value.code() is grpc.StatusCode.INTERNAL
            await until_free(rig)


async def test_a_request_that_waits_for_its_key_s_places_waits_no_longer_than_its_deadline(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with router_rig() as rig:

        async def never(*_: object) -> None:
            await asyncio.sleep(600)

        monkeypatch.setattr("quire_router.limits.concurrency.ConcurrencyLimits.enter", never)
        began = time.monotonic()
        answer = await rig.complete("a", max_tokens=1, timeout_s=0.3)
        assert answer.status_code == 504 and answer.json()["error"]["code"] == "REQUEST_TIMEOUT"
        assert time.monotonic() - began < 10
        assert rig.router.admission.inside == 0
